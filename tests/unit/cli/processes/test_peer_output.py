"""What peers write is passed on whole, whatever our own streams are."""

import io

import pytest

from pccl.cli.processes.children import STDERR, STDOUT, OutputLine
from pccl.cli.processes.peer_output import PeerOutput


class Short(io.RawIOBase):
    """A bare file that takes at most so many bytes at a time, as with a signal in the midst."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        piece = bytes(data)[: self.most]  # type: ignore[call-overload]
        self.taken += piece
        return len(piece)


class Unbuffered:
    """A standard stream under PYTHONUNBUFFERED: its buffer is none."""

    def __init__(self, most: int) -> None:
        self.buffer = Short(most)

    def isatty(self) -> bool:
        return False


def test_a_write_cut_short_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Unbuffered(7), Unbuffered(1)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    output = PeerOutput(["p0", "p1"])
    output.write(0, OutputLine(STDOUT, b"x" * 20))
    output.write(1, OutputLine(STDOUT, b"y"))
    output.write(1, OutputLine(STDERR, b"z"))
    output.complain("no")
    output.flush()
    assert out.buffer.taken == b"[p0] " + b"x" * 20 + b"\n[p1] y\n"
    assert err.buffer.taken == b"[p1] z\npccl launch: no\n"
