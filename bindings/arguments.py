"""What programs pass to the wrappers of a training loop, checked where it comes in."""

from __future__ import annotations

from typing import Any

import pccl
from pccl.bindings.listeners import Listeners
from pccl.checks import check_range

COUNT_MAX = 2**31 - 1
"""Of anything that is counted in steps or parts."""


def check_count(name: str, value: object, lowest: int = 1) -> int:
    """Check a number of steps or parts and return it.

    Raises:
        TypeError, ValueError: it can't be used; the message says what can.
    """
    return check_range(name, value, lowest, COUNT_MAX)


def check_amount(name: str, value: object, below: float) -> float:
    """Check a number of at least 0 and return it.

    Raises:
        TypeError, ValueError: it can't be used; the message says what can.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not 0 <= value < below:
        raise ValueError(f"{name} must be at least 0 and less than {below:g}, not {value!r}")
    return float(value)


def check_communicator(comm: object) -> None:
    """What peers are met with; anything that does what a ``Communicator`` does.

    Raises:
        TypeError: it is none.
    """
    methods = (getattr(comm, name, None) for name in ("all_reduce", "sync_shared_state"))
    if isinstance(comm, type) or not all(map(callable, methods)):
        raise TypeError(f"comm must be a pccl.Communicator, not {comm!r}")
    if isinstance(comm, pccl.aio.Communicator):
        raise TypeError("comm must be a pccl.Communicator; one of pccl.aio belongs to its loop")


def check_compression(compression: object) -> pccl.QuantizationOptions | None:
    """How values are shortened for the wire; None: they are not.

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


def check_listeners(on_event: Any) -> Listeners:
    """One function, or several; called as one.

    Raises:
        TypeError: something else.
    """
    try:
        listeners: tuple[Any, ...] = (on_event,) if callable(on_event) else tuple(on_event)
    except TypeError:
        listeners = (on_event,)
    for listener in listeners:
        if not callable(listener):
            raise TypeError(
                f"on_event must be a function of an event, or several of them, not {listener!r}"
            )
    return Listeners(listeners)
