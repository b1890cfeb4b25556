"""What a program passes to ``DiLoCo``, checked where it comes in."""

from __future__ import annotations

import math
from typing import Any

import pccl
from pccl.bindings.events import Consumer

WEIGHT_MAX = 1e30
"""Of one step: sums of it stay far from what a reduce takes."""


def check_mixing(mixing: object, delay: int, sync_steps: int) -> float:
    """How much of the local parameters remains; None: what is good for the delay.

    Args:
        mixing: as of ``DiLoCo``.
        delay: in inner steps.
        sync_steps: inner steps of a period; 0: a time budget counts.

    Raises:
        TypeError, ValueError: it can't be used; the message says why.
    """
    if mixing is None:
        return 0.5 if 0 < delay < (sync_steps or math.inf) else 0.0
    if isinstance(mixing, bool) or not isinstance(mixing, (int, float)):
        raise TypeError(f"mixing must be a number, not {mixing!r}")
    if not 0 <= mixing < 1:
        raise ValueError(
            f"mixing must be at least 0 (take the outer parameters) and less than 1, not {mixing}"
        )
    return float(mixing)


def check_weight(weight: object) -> None:
    """Work done in a step.

    Raises:
        TypeError, ValueError: it is no amount of work.
    """
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"weight must be a number, not {weight!r}")
    if not 0 <= weight <= WEIGHT_MAX:
        raise ValueError(
            f"weight must be a finite number of at least 0, and at most {WEIGHT_MAX:g}, not "
            f"{weight!r}"
        )


def check_min_peers(min_peers: object) -> int:
    """A number of peers.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(min_peers, bool) or not isinstance(min_peers, int):
        raise TypeError(f"min_peers must be a whole number, not {min_peers!r}")
    if min_peers < 1:
        raise ValueError(f"min_peers must be at least 1, not {min_peers}")
    return min_peers


def check_compression(compression: object) -> pccl.QuantizationOptions | None:
    """How pseudo-gradients are shortened; None: they are not.

    Raises:
        TypeError, ValueError: it can't be used; the message says what can.
    """
    if compression is None or isinstance(compression, pccl.QuantizationOptions):
        return compression
    if not isinstance(compression, str):
        raise TypeError(
            "compression must be the name of a format, such as 'int8' or 'int4', or "
            f"QuantizationOptions, not {type(compression).__name__}"
        )
    formats = {one.name.lower(): one for one in pccl.WireFormat}
    if compression not in formats:
        known = ", ".join(map(repr, formats))
        raise ValueError(f"compression must be one of {known}, not {compression!r}")
    return None if compression == "none" else pccl.QuantizationOptions(format=compression)


def check_listeners(on_event: Any) -> tuple[Consumer, ...]:
    """One function, or several.

    Raises:
        TypeError: something else.
    """
    listeners: tuple[Any, ...] = (on_event,) if callable(on_event) else tuple(on_event)
    for listener in listeners:
        if not callable(listener):
            raise TypeError(f"on_event must be functions of an event, not {listener!r}")
    return listeners
