"""Makes texts of other processes safe to log, and cuts them."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text of another process in a form that is safe to log or show: one line, no escapes.

    It replaces unprintable characters: line breaks, control characters, changes of direction.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str, bytes_max: int) -> str:
    """Return ``text``, cut to ``bytes_max`` (at least 3) bytes of UTF-8 with ``...`` at the end."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return text
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "..."
