"""What a program's end does with the masters that it has started."""

from __future__ import annotations

import logging

import pytest

from pccl import master_node
from pccl.master_node import MasterNode


def test_repr() -> None:
    node = MasterNode("127.0.0.1:0")
    assert repr(node) == "<pccl.master_node.MasterNode: 127.0.0.1:0, not running>"
    with node:
        assert repr(node) == f"<pccl.master_node.MasterNode: {node.address}, running>"


def test_a_master_that_ends_while_the_program_waits_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = {MasterNode("127.0.0.1:0") for _ in range(3)}
    monkeypatch.setattr(master_node, "_serving", serving)
    lines: list[str] = []

    class AnotherThread(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            serving.clear()

    log, handler = logging.getLogger("pccl.master"), AnotherThread()
    log.addHandler(handler)
    try:
        master_node._serve_on()  # pyright: ignore[reportPrivateUsage]
    finally:
        log.removeHandler(handler)
    assert len(lines) == 3


TOKEN = "9f3c1e5b7a2d4860b1c8e0f7"


def test_a_proxy_opens_a_master_on_loopback(caplog: pytest.LogCaptureFixture) -> None:
    for token in (None, TOKEN):
        with MasterNode("127.0.0.1:0", token=token, proxy_from="10.0.0.9"):
            pass
    assert caplog.text.count("no token: any process that reaches its proxy can join the run") == 1


@pytest.mark.parametrize(
    ("listen", "named", "refused"),
    [
        ("127.0.0.1:0", "127.0.0.0/8", "127.0.0.1"),
        ("0.0.0.0:0", "10.0.0.9,127.0.0.1", "127.0.0.1"),
        ("[::]:0", "::1", "::1"),
        ("127.0.0.1:0", "127.0.0.2", ""),
        ("0.0.0.0:0", "10.0.0.9", ""),
    ],
)
def test_a_proxy_that_connects_as_this_machine_does_shuts_it_out(
    listen: str, named: str, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MasterNode(listen, token=TOKEN, proxy_from=named):
        pass
    text = f"refuses processes of this machine that connect from {refused}, such as pccl status"
    assert (text in caplog.text) is bool(refused)


@pytest.mark.parametrize("named", ["lb.example", "0.0.0.0/0"])
def test_a_name_of_a_proxy_that_is_none(named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MasterNode("127.0.0.1:0", proxy_from=named)
