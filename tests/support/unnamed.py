"""Texts for people without the names that stand beside the ids of peers."""

from __future__ import annotations

import re


def unnamed(text: object) -> str:
    """The text of an error, or another one, without default names: ``peer 3 (HOST:PID)``."""
    return re.sub(r"(\d) \([^\s()]*:\d+\)", r"\1", str(text))
