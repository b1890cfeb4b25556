"""The ``Schedule`` of a run: the fragment of each round, and the inner steps between rounds.

A round is one outer step of one fragment. Rounds are numbered from 0, and take the fragments in
turn, so the number of a round determines its fragment. With P fragments and H inner steps between
two synchronizations of a fragment, a round begins every H / P steps (Streaming DiLoCo, Douillard
et al., arXiv:2501.18512, section 2.2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pccl.bindings.arguments import check_amount, check_count
from pccl.checks import shown

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

ORDERS = ("strided", "sequential", "strided-blocks", "sequential-blocks")
"""Ways to distribute parameters over fragments: see ``partition``."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Determines when rounds begin and when their averages are merged.

    Attributes:
        fragments: number of fragments; 1 averages the whole model at once.
        sync_steps: inner steps between two rounds of the same fragment; 0: a time budget counts.
        sync_s: the time budget, in seconds; 0.0: inner steps count.
        delay: inner steps between taking a pseudo-gradient and merging its average.
    """

    fragments: int = 1
    sync_steps: int = 100
    sync_s: float = 0.0
    delay: int = 0

    def __str__(self) -> str:
        every = f"{self.sync_steps} steps" if self.sync_steps else f"{self.sync_s:g} s"
        fragments = f", {self.fragments} fragments" if self.fragments > 1 else ""
        return f"every {every}{fragments}{f', delay {self.delay}' if self.delay else ''}"

    def fragment(self, number: int) -> int:
        """Return the fragment of round ``number``."""
        return number % self.fragments

    def steps_before(self, number: int) -> int:
        """Return the inner steps between the beginnings of rounds ``number - 1`` and ``number``."""
        turn = number % self.fragments
        return (turn + 1) * self.sync_steps // self.fragments - (
            turn * self.sync_steps // self.fragments
        )

    @property
    def seconds_between(self) -> float:
        """Seconds between the beginnings of two rounds, with a time budget."""
        return self.sync_s / self.fragments

    def mixing(self, asked: object) -> float:
        """Return the share of the local parameters that a merge keeps; for None, the default.

        Raises:
            TypeError, ValueError: ``asked`` is not a share; the message says why.
        """
        if asked is None:
            return 0.5 if 0 < self.delay < (self.sync_steps or math.inf) else 0.0
        return check_amount("mixing", asked, 1.0)

    @property
    def is_round_late(self) -> bool:
        """Whether an average is merged when the next pseudo-gradient is taken."""
        return 0 < self.delay == self.sync_steps

    def check_eager(self, eager: object, mixing: float) -> None:
        """Check that merges can preview outer steps, if the program asks for that.

        Raises:
            TypeError, ValueError: they cannot; the message says why.
        """
        if not isinstance(eager, bool):
            raise TypeError(f"eager must be True or False, not {shown(eager)}")
        if eager and not self.is_round_late:
            raise ValueError(
                "eager needs a delay of sync_every inner steps: a merge previews the outer step of "
                "the pseudo-gradient that was taken just before"
            )
        if eager and mixing:
            raise ValueError("eager loads the preview of an outer step whole, so mixing must be 0")


def schedule(sync_every: int | str, fragments: int, delay: int) -> Schedule:
    """Check the settings of a program, and return their schedule.

    Args:
        sync_every: inner steps, or a time budget such as ``"30s"``, ``"500ms"``, ``"2min"``.
        fragments: number of fragments, 1 or more.
        delay: inner steps from 0 to ``sync_every``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message names the limits.
    """
    check_count("fragments", fragments)
    check_count("delay", delay, lowest=0)
    if isinstance(sync_every, str):
        matched = _BUDGET.fullmatch(sync_every)
        seconds = float(matched[1]) * _SECONDS[matched[2]] if matched else 0.0
        if not seconds:
            raise ValueError(
                "sync_every must be a number of inner steps or a time such as '30s', '500ms' or "
                f"'2min', not {sync_every!r}"
            )
        return Schedule(fragments, 0, seconds, delay)
    check_count("sync_every", sync_every)
    if fragments > sync_every:
        raise ValueError(
            f"fragments must be at most sync_every ({sync_every}), not {fragments}: at most one "
            "fragment can be due in an inner step"
        )
    if delay > sync_every:
        raise ValueError(
            f"delay must be at most sync_every ({sync_every}), not {delay}: a fragment must be "
            "merged before it is reduced again"
        )
    return Schedule(fragments, sync_every, 0.0, delay)


def partition(
    sizes: Sequence[int], fragments: int, order: str, names: Sequence[str] = ()
) -> tuple[tuple[int, ...], ...]:
    """Distribute parameters over non-empty fragments with about equal numbers of elements.

    ``sequential``: a fragment has neighbouring parameters. ``strided``: it has parameters of all
    depths (arXiv:2501.18512, section 2.2, for the layers of a transformer). Taking every
    P-th parameter would put all large ones into the same fragments if P divides the number of
    tensors in a layer. So each parameter goes to the smallest fragment, the largest one first.

    With ``-blocks``, a block stays whole: all parameters whose names are equal up to their first
    number, as ``layers.3``; or else the parameters of one module. ``strided-blocks`` deals the
    numbered blocks in turn, as that paper does; other blocks go to the smallest fragments.

    Args:
        sizes: number of elements of each parameter.
        fragments: number of fragments.
        order: one of ``ORDERS``.
        names: name of each parameter, for blocks.

    Returns:
        For each fragment the indices of its parameters, ascending.

    Raises:
        ValueError: ``order`` is unknown, or there are fewer parameters or blocks than fragments.
    """
    if order not in ORDERS:
        raise ValueError(f"fragment_order must be one of {', '.join(ORDERS)}, not {order!r}")
    pattern, _, kind = order.partition("-")
    units: dict[tuple[str, bool], list[int]] = {}
    for index in range(len(sizes)):
        units.setdefault(_block(names[index]) if kind else (str(index), False), []).append(index)
    if len(units) < fragments:
        raise ValueError(
            f"fragments must be at most {len(units)}, the number of {kind or 'parameter tensors'}, "
            f"not {fragments}"
        )
    totals = [sum(sizes[index] for index in unit) for unit in units.values()]
    parts: Sequence[Sequence[int]]
    if pattern == "strided":
        parts = _dealt(totals, fragments, [turn for turn, (_, whole) in enumerate(units) if whole])
    else:
        parts = _neighbours(totals, fragments)
    listed = list(units.values())
    return tuple(tuple(sorted(i for turn in part for i in listed[turn])) for part in parts)


def _block(name: str) -> tuple[str, bool]:
    """Return the block of a parameter, and whether it has a number."""
    parts = name.split(".")
    for place, part in enumerate(parts, 1):
        if part.isdecimal():
            return ".".join(parts[:place]), True
    return ".".join(parts[:-1]), False


def _neighbours(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    parts: list[list[int]] = []
    left, begin = sum(sizes), 0
    for number in range(fragments):
        goal, end, taken = left / (fragments - number), begin, 0
        last = len(sizes) - (fragments - number - 1)  # leave one for each later fragment
        while end < last and (end == begin or taken + sizes[end] / 2 <= goal):
            taken += sizes[end]
            end += 1
        if number == fragments - 1:
            end = len(sizes)
        parts.append(list(range(begin, end)))
        begin, left = end, left - taken
    return parts


def _dealt(sizes: Sequence[int], fragments: int, in_turn: Sequence[int]) -> list[list[int]]:
    """Deal ``in_turn`` one after the other, and then each of the rest to the smallest hand."""
    hands = [list(in_turn[first::fragments]) for first in range(fragments)]
    held = [sum(sizes[index] for index in hand) for hand in hands]
    rest = set(range(len(sizes))).difference(in_turn)
    for index in sorted(rest, key=lambda index: (-sizes[index], index)):
        turn = min(range(fragments), key=lambda hand: (held[hand], len(hands[hand])))
        hands[turn].append(index)
        held[turn] += sizes[index]
    return hands
