"""How a connected socket is tuned: what is local, what the kernel refuses, what it grants."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

import pccl.transports.tcp_socket as tcp_socket
from pccl.transports.tcp_socket import LOCAL_SEND_BUFFER_BYTES, congestion_of, tune_path

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this system has no names for congestion control"
)

SEND_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER_BYTES)
RENO = (socket.IPPROTO_TCP, getattr(socket, "TCP_CONGESTION", 0), b"reno")


class StubSocket:
    """A socket whose kernel paces by ``algorithm`` and refuses the options in ``refused``."""

    def __init__(self, algorithm: bytes, refused: tuple[int, ...] = ()) -> None:
        self.algorithm = algorithm
        self.refused = refused
        self.options: list[tuple[int, int, int | bytes]] = []

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.algorithm.ljust(length, b"\0")

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if option in self.refused:
            raise PermissionError(1, "Operation not permitted")
        self.options.append((level, option, value))


def tuned(
    monkeypatch: pytest.MonkeyPatch, sock: StubSocket, *, is_local: bool, grants: bool
) -> list[Any]:
    monkeypatch.setattr(tcp_socket, "_grants_send_buffer", lambda: grants)
    tune_path(cast("socket.socket", sock), is_local=is_local)
    return sock.options


@pytest.mark.parametrize("algorithm", [b"bbr", b"bbr2", b"bbr3"])
def test_what_paces_is_left_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, algorithm: bytes
) -> None:
    found = tuned(monkeypatch, StubSocket(algorithm), is_local=True, grants=True)
    assert found == [RENO, SEND_BUFFER]


@pytest.mark.parametrize("algorithm", [b"cubic", b"reno", b"dctcp"])
def test_what_does_not_pace_stays(monkeypatch: pytest.MonkeyPatch, algorithm: bytes) -> None:
    found = tuned(monkeypatch, StubSocket(algorithm), is_local=True, grants=True)
    assert found == [SEND_BUFFER]


def test_a_kernel_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = StubSocket(b"bbr", refused=(socket.TCP_CONGESTION, socket.SO_SNDBUF))
    assert tuned(monkeypatch, sock, is_local=True, grants=True) == []


def test_a_buffer_that_is_not_granted_in_full_stays_autotuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tuned(monkeypatch, StubSocket(b"cubic"), is_local=True, grants=False) == []


def test_between_machines_the_system_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned(monkeypatch, StubSocket(b"bbr"), is_local=False, grants=True) == []


BBR = (socket.IPPROTO_TCP, getattr(socket, "TCP_CONGESTION", 0), b"bbr")


@pytest.mark.parametrize(
    ("system", "accepted", "expected"),
    [("bbr", b"reno", [BBR]), ("bbr", b"cubic", []), ("cubic", b"reno", []), ("reno", b"reno", [])],
)
def test_what_a_listener_accepts_from_elsewhere_gets_the_systems_choice(
    monkeypatch: pytest.MonkeyPatch, system: str, accepted: bytes, expected: list[Any]
) -> None:
    monkeypatch.setattr(tcp_socket, "_system_congestion", lambda: system)
    assert tuned(monkeypatch, StubSocket(accepted), is_local=False, grants=True) == expected


@pytest.mark.parametrize(
    ("family", "to", "expected"),
    [
        (socket.AF_INET, ("127.0.0.1", 9), True),
        (socket.AF_INET, ("127.3.4.5", 9), False),  # the system answers from 127.0.0.1
        (socket.AF_INET, ("192.0.2.1", 9), False),
        (socket.AF_INET, ("", 9), False),
    ],
)
def test_addresses_of_this_machine(family: int, to: tuple[str, int], expected: bool) -> None:
    assert tcp_socket.is_own(family, to) is expected


def test_the_name_of_a_real_socket_is_one_that_the_system_knows() -> None:
    with socket.socket() as sock:
        default = congestion_of(sock)
        assert default
        assert default.isascii()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # always allowed
        assert congestion_of(sock) == "reno"


def test_a_closed_socket_has_no_name() -> None:
    sock = socket.socket()
    sock.close()
    assert congestion_of(sock) == ""
