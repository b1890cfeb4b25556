"""Annotations of fields: the bounds that decoders enforce."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Below:
    """Annotation of an integer field: valid values are ``0 <= value < bound``."""

    bound: int


@dataclass(frozen=True, slots=True)
class UpTo:
    """Annotation of a float field: valid values are ``smallest <= value <= largest``."""

    largest: float
    smallest: float = 0


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotation of a text, a byte string or a list: the most bytes (of UTF-8) or items."""

    count: int
