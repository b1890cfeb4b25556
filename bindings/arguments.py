"""Checks the arguments that programs pass to the wrappers of a training loop."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import pccl
from pccl.checks import check_member, check_range, shown
from pccl.observe.listeners import Listeners

COUNT_MAX = 2**31 - 1
"""Largest number of steps, parts or bytes in an argument."""


def check_count(name: str, value: object, lowest: int = 1) -> int:
    """Check a number of steps, parts or bytes, and return it.

    Raises:
        TypeError, ValueError: ``value`` is not such a number; the message names the limits.
    """
    return check_range(name, value, lowest, COUNT_MAX)


def check_amount(name: str, value: object, below: float) -> float:
    """Check a number from 0 to less than ``below``, and return it as a float.

    Raises:
        TypeError, ValueError: ``value`` is not such a number; the message names the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    if not 0 <= value < below:
        raise ValueError(f"{name} must be at least 0 and less than {below:g}, not {shown(value)}")
    return float(value)


def check_communicator(comm: object) -> None:
    """Check that ``comm`` has the methods of a blocking ``Communicator``.

    Raises:
        TypeError: a method is missing, or ``comm`` is for asyncio.
    """
    methods = (getattr(comm, name, None) for name in ("all_reduce", "sync_shared_state"))
    if isinstance(comm, type) or not all(map(callable, methods)):
        raise TypeError(f"comm must be a pccl.Communicator, not {shown(comm)}")
    if isinstance(comm, pccl.aio.Communicator):
        raise TypeError("comm must be a blocking pccl.Communicator, not one of pccl.aio")


_users: WeakKeyDictionary[pccl.Communicator, tuple[ref[object], str]] = WeakKeyDictionary()
"""Communicator -> the wrapper that makes its joint calls, and the name of the wrapper's class."""


def claim(comm: pccl.Communicator, user: object, name: str) -> None:
    """Make ``user`` the only wrapper that calls ``comm``, until ``release`` or while it exists.

    Two wrappers cannot share a communicator: all members must make the joint calls in one order.

    Args:
        comm: the communicator.
        user: an object that exists as long as the wrapper may call ``comm``.
        name: name of the wrapper's class.

    Raises:
        ValueError: another wrapper uses ``comm``.
    """
    other, called = _users.get(comm, (None, ""))
    if other is not None and other() not in (None, user):
        raise ValueError(
            f"a {called} uses this communicator, and two objects cannot share one; close() the "
            f"{called} first, and if that closed the communicator, make a new one"
        )
    _users[comm] = ref(user), name


def release(comm: pccl.Communicator, user: object) -> None:
    """End the claim of ``user``, if it has one."""
    if comm in _users and _users[comm][0]() is user:
        del _users[comm]


def check_compression(compression: object) -> pccl.QuantizationOptions | None:
    """Convert the argument ``compression`` to options; None: no compression.

    Raises:
        TypeError, ValueError: ``compression`` is neither a known format nor QuantizationOptions.
    """
    if compression is None or isinstance(compression, pccl.QuantizationOptions):
        return compression
    if not isinstance(compression, str):
        raise TypeError(
            "compression must be the name of a format, such as 'int8' or 'int4', or "
            f"QuantizationOptions, not {type(compression).__name__}"
        )
    wire = check_member("compression", compression, pccl.WireFormat)
    return None if wire is pccl.WireFormat.NONE else pccl.QuantizationOptions(format=wire)


def check_listeners(on_event: Any) -> Listeners:
    """Convert the argument ``on_event``, one function or several, to one callable.

    Raises:
        TypeError: an item cannot be called.
    """
    try:
        listeners: tuple[Any, ...] = (on_event,) if callable(on_event) else tuple(on_event)
    except TypeError:
        listeners = (on_event,)
    for listener in listeners:
        if not callable(listener):
            raise TypeError(
                "on_event must be a function of an event, or several functions, not "
                f"{shown(listener)}"
            )
    return Listeners(listeners)
