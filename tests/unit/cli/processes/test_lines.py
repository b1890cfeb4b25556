"""Lines out of chunks, however the chunks are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.cli.processes.lines import LINE_BYTES_MAX, LineSplitter


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.finish()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"on", b"e\ntw", b"o"], [b"one", b"two"]),
        ([b"\n\nx\n"], [b"", b"", b"x"]),
        ([b"windows\r\nends\r", b"\n"], [b"windows", b"ends"]),
        ([b"\r10%", b"\r20%", b"\r30%\n"], [b"10%", b"20%", b"30%"]),
        ([b"10%\r", b"20%\r"], [b"10%", b"20%"]),
        ([b"\xff\x00\xfe\n\x1b[31m"], [b"\xff\x00\xfe", b"\x1b[31m"]),
        ([], []),
        ([b"\r"], []),
    ],
)
def test_lines(chunks: list[bytes], lines: list[bytes]) -> None:
    assert split(*chunks) == lines


def test_a_line_is_told_as_soon_as_it_ends() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == [b"one"]
    assert splitter.feed(b"o\n") == [b"two"]
    assert splitter.finish() == []


def test_a_long_line_comes_in_pieces() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * LINE_BYTES_MAX) == []
    assert splitter.feed(b"x" * LINE_BYTES_MAX + b"yz") == [b"x" * LINE_BYTES_MAX] * 2
    assert splitter.feed(b"\n") == [b"yz"]


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xff", b"bc"])), st.data())
def test_cuts_do_not_matter(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    bounds = [0, *cuts, len(whole)]
    chunks = [whole[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert split(*chunks) == split(whole)


@given(st.lists(st.sampled_from([b"a", b"\n", b"\xff", b"bc"])))
def test_without_returns_it_is_what_bytes_do(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    *lines, rest = whole.split(b"\n")
    assert split(whole) == lines + ([rest] if rest else [])
