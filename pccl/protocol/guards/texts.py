"""Texts of other processes, as they may be kept, logged and shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text of others as it may be logged or shown: in one line, in its order, without escapes.

    Whatever is not printable (line breaks, control characters, changes of direction) is replaced.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str, bytes_max: int) -> str:
    """``text``, or its beginning: at most so many bytes of UTF-8, three or more."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return text
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "..."
