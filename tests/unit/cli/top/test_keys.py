"""The keys in the bytes that a terminal sends."""

from __future__ import annotations

from pccl.cli.top.keys import keys


def test_keys_of_one_read() -> None:
    assert list(keys(b"q\x1b[A\x1bOB\x1b[5~\r7\x7f")) == [
        "q", "up", "down", "page up", "enter", "7", "escape",
    ]  # fmt: skip
    assert list(keys(b"\x1b")) == ["escape"]
    assert list(keys(b"\x1b[1;5C\x1b[200~\x00\xff")) == ["\N{REPLACEMENT CHARACTER}"]
