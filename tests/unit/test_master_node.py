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
