"""Checks of plain arguments, made before any data is sent. Their errors name the argument.

All raise TypeError or ValueError, never PCCLError, because scripts retry after a PCCLError.
"""

from __future__ import annotations

import enum
import math
import numbers
import operator
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import SupportsIndex, TypeVar, cast

from pccl.protocol import limits
from pccl.protocol.guards.texts import shortened
from pccl.protocol.limits import PEERS_MAX, Timing
from pccl.protocol.limits import SECONDS_MAX as SECONDS_MAX
from pccl.protocol.status_report import FIGURE_NAME_BYTES_MAX, FIGURES_MAX, Figure
from pccl.protocol.types import GRACE_MS_MAX, LOSS_MAX, QUORUM_MIN, WEIGHT_MAX, Quorum

_E = TypeVar("_E", bound=enum.IntEnum)
_T = TypeVar("_T")

PEER_GROUP_MAX = 2**32 - 1
LANES_MAX = limits.LANES_MAX
MIN_PEERS_MAX = PEERS_MAX
TAG_MAX = 2**63 - 1
"""The library uses larger numbers itself."""
ATTEMPTS_MAX = 2**31 - 1
IN_FLIGHT_MAX = 2**31 - 1
STEP_MAX = 2**62
UPLOAD_BYTES_PER_S_MIN = 64_000
"""With less, the messages of a run would wait too long."""
UPLOAD_BYTES_PER_S_MAX = limits.BYTES_PER_S_MAX
_SHOWN_BYTES_MAX = 200

UNITS = {
    "": 1,
    "B": 1,
    **{
        letter + end: 1 << 10 * (place + 1)
        for place, letter in enumerate("KMG")
        for end in ("", "iB")
    },
    **{letter + "B": 1000 ** (place + 1) for place, letter in enumerate("KMG")},
}
"""Bytes of each unit. A letter alone is a power of 1024, as in nccl-tests."""

SIZE_MAX = 64 << 30
"""Largest size of one tensor that a command takes, in bytes."""

_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def shown(value: object) -> str:
    """Return the ``repr`` of a wrong argument for an error text, cut to 200 bytes."""
    return shortened(repr(value), _SHOWN_BYTES_MAX)


def check_range(name: str, value: object, lowest: int, highest: int) -> int:
    """Check an integer argument and return it.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is out of range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    try:
        number = operator.index(cast("SupportsIndex", value))  # accepts NumPy's integers, too
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {shown(value)}") from None
    if not lowest <= number <= highest:
        raise ValueError(f"{name} must be from {lowest} to {highest}, not {value}")
    return number


def check_ranks(ranks: object, size: int, own: int) -> tuple[int, ...]:
    """Check the ranks of a subgroup and return them.

    Raises:
        TypeError: ``ranks`` is no sequence of integers.
        ValueError: a rank does not exist or comes twice, or that of this peer is missing.
    """
    try:
        given = tuple(cast("Iterable[object]", ranks))
    except TypeError:
        raise TypeError(f"ranks must be a sequence of integers, not {shown(ranks)}") from None
    chosen = tuple(check_range("a rank", rank, 0, size - 1) for rank in given)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"ranks must differ, but they are {shown(list(chosen))}")
    if own not in chosen:
        raise ValueError(f"ranks must have that of this peer, {own}; only members can make calls")
    return chosen


def check_timeout(timeout_s: object) -> float | None:
    """Check a time budget in seconds and return it; None: no limit.

    Raises:
        TypeError: ``timeout_s`` is not a number.
        ValueError: ``timeout_s`` is out of range.
    """
    if timeout_s is None:
        return None
    seconds = _real("timeout_s must be a number of seconds or None", timeout_s)
    if not 0 < seconds <= SECONDS_MAX:
        raise ValueError(
            f"timeout_s must be above 0 and at most {SECONDS_MAX}, not {timeout_s}; "
            "None waits without a limit"
        )
    return seconds


def check_weight(weight: object) -> float:
    """Check the weight of a contribution and return it.

    Raises:
        TypeError: ``weight`` is not a number.
        ValueError: ``weight`` is negative, too large, or not finite.
    """
    number = _real("weight must be a number or None", weight)
    if not 0 <= number <= WEIGHT_MAX:
        raise ValueError(f"weight must be from 0 to {WEIGHT_MAX:g}, not {weight}")
    return number


def check_between(name: str, value: object, lowest: float, highest: float) -> float:
    """Check a number and return it as a float.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is out of range.
    """
    number = _real(f"{name} must be a number", value)
    if not lowest <= number <= highest:
        raise ValueError(f"{name} must be from {lowest:g} to {highest:g}, not {value}")
    return number


def check_quorum(quorum: object, grace_s: object) -> Quorum | None:
    """Check the quorum of a joint call and its grace; return None if the call has no quorum.

    Raises:
        TypeError: one of them has the wrong type.
        ValueError: one of them is out of range, or there is a grace without a quorum.
    """
    grace_ms = None
    if grace_s != "auto":
        what = 'grace_s must be a number of seconds or "auto"'
        seconds = _real(what, grace_s)
        if not 0 <= seconds <= GRACE_MS_MAX / 1e3:
            raise ValueError(f"grace_s must be from 0 to {GRACE_MS_MAX // 1000} s, not {grace_s}")
        grace_ms = round(seconds * 1e3)
    if quorum is None:
        if grace_ms is not None:
            raise ValueError("grace_s is for calls with a quorum; pass a quorum, or leave it out")
        return None
    if isinstance(quorum, float):
        if not 0 < quorum <= 1:
            raise ValueError(f"quorum must be a number of members or a share up to 1, not {quorum}")
        return Quorum(share=quorum, grace_ms=grace_ms)
    return Quorum(check_range("quorum", quorum, QUORUM_MIN, PEERS_MAX), grace_ms=grace_ms)


def check_loss(loss: object) -> float | None:
    """Check the loss of a model and return it; None if it is not finite, or huge.

    Raises:
        TypeError: ``loss`` is not a number.
    """
    number = _real("loss must be a number or None (loss.item() of a tensor)", loss)
    return number if -LOSS_MAX <= number <= LOSS_MAX else None


def check_figures(figures: object) -> tuple[Figure, ...]:
    """Check the figures of a program and return those that are finite.

    Raises:
        TypeError: ``figures`` is no mapping of names to numbers.
        ValueError: there are too many, or a name is too long.
    """
    if not isinstance(figures, Mapping):
        raise TypeError(f"figures must map names to numbers, not {shown(figures)}")
    given = cast("Mapping[object, object]", figures)
    if len(given) > FIGURES_MAX:
        raise ValueError(f"figures has {len(given)} numbers; report at most {FIGURES_MAX}")
    found: list[Figure] = []
    for name, value in given.items():
        text = check_text("the name of a figure", name)
        if len(text.encode()) > FIGURE_NAME_BYTES_MAX:
            raise ValueError(
                f"the name {text!r} of a figure has more than {FIGURE_NAME_BYTES_MAX} bytes; "
                "shorten it"
            )
        number = _real(f"the figure {text!r} must be a number", value)
        if -LOSS_MAX <= number <= LOSS_MAX:
            found.append(Figure(text, number))
    return tuple(found)


def _real(rule: str, value: object) -> float:
    """Return ``value`` as a float, which may be NaN; infinity if it is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{rule}, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_listener(name: str, listener: object) -> None:
    """Check that a listener is a function or None.

    Raises:
        TypeError: ``listener`` is not callable.
    """
    if listener is not None and not callable(listener):
        raise TypeError(f"{name} must be a function, not {type(listener).__name__}")


def check_timing(timing: object) -> Timing:
    """Check the deadlines and return them; for None, return the defaults.

    Raises:
        TypeError: ``timing`` is not a ``Timing``.
    """
    return Timing() if timing is None else check_type("timing", timing, Timing)


def check_flag(name: str, value: object) -> bool:
    """Check a True or False and return it.

    Raises:
        TypeError: ``value`` is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return value


def check_text(name: str, value: object) -> str:
    """Check a string that must not be empty and return it.

    Raises:
        TypeError: ``value`` is not a string.
        ValueError: ``value`` is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {shown(value)}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def check_member(name: str, value: object, kind: type[_E]) -> _E:
    """Check that ``value`` is a member of an enum, or its number or name, and return the member.

    The case of a name does not matter.

    Raises:
        TypeError: ``value`` is neither a number nor a string.
        ValueError: the enum has no such member.
    """
    names: dict[str, _E] = _names_of(kind)
    error: type[Exception] = ValueError
    if isinstance(value, int) and not isinstance(value, bool):
        if value in names.values():
            return kind(value)
    elif not isinstance(value, str):
        error = TypeError
    elif value.lower() in names:
        return names[value.lower()]
    raise error(f"{name} must be one of {', '.join(map(repr, names))}, not {shown(value)}")


@cache
def _names_of(kind: type[_E]) -> dict[str, _E]:
    """Return the members of an enum by their names and labels, in lower case."""
    members: dict[str, _E] = {}
    for member in kind:
        members[str(getattr(member, "label", member.name)).lower()] = member
        members[member.name.lower()] = member
    return members


def check_type(name: str, value: object, kind: type[_T]) -> _T:
    """Check that ``value`` is an instance of ``kind`` and return it.

    Raises:
        TypeError: ``value`` has another type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a pccl.{kind.__name__}, not {shown(value)}")
    return value


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as ``64MiB`` names.

    Raises:
        ValueError: not a size, or out of range; the message says what is allowed.
    """
    found = _SIZE_PATTERN.fullmatch(text.strip())
    unit = found[2][:1].upper() + found[2][1:] if found else ""
    if found is None or unit not in UNITS:
        raise ValueError(
            f"{text!r} is not a size; write a number and a unit, such as 64MiB. Units: B; KiB, "
            "MiB, GiB or K, M, G (powers of 1024); KB, MB, GB (powers of 1000)"
        )
    size = float(found[1]) * UNITS[unit]
    if size != int(size) or not 0 < size <= SIZE_MAX:
        raise ValueError(f"{text!r} is not a whole number of bytes from 1 to {SIZE_MAX >> 30} GiB")
    return int(size)


def check_upload(name: str, bytes_per_s: object) -> int | None:
    """Check a limit of what is sent, in bytes per second, and return it; None: 0, no limit.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    number = check_range(name, bytes_per_s, 0, UPLOAD_BYTES_PER_S_MAX)
    if 0 < number < UPLOAD_BYTES_PER_S_MIN:
        raise ValueError(
            f"{name} must be at least {UPLOAD_BYTES_PER_S_MIN} bytes per second, or 0 for no "
            f"limit, not {number}"
        )
    return number or None
