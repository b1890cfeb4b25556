"""``Schedule``: which fragment is reduced in which round, and how many inner steps lie between.

A round is one outer step of one fragment. The rounds of a run are numbered through, and take the
fragments in turn, so that everyone who knows the number of a round knows its fragment. With P
fragments and H inner steps from one synchronization of a fragment to its next, a round begins
every H / P steps (Streaming DiLoCo, Douillard et al., arXiv:2501.18512, section 2.2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pccl.bindings.arguments import check_amount, check_count

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

ORDERS = ("strided", "sequential")
"""How parameters are spread over fragments: see ``partition``."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When rounds begin and when their outcome is merged.

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

    def fragment(self, number: int) -> int:
        """The fragment of a round."""
        return number % self.fragments

    def steps_before(self, number: int) -> int:
        """Inner steps between the beginning of the round before this one and of this one."""
        turn = number % self.fragments
        return (turn + 1) * self.sync_steps // self.fragments - (
            turn * self.sync_steps // self.fragments
        )

    @property
    def seconds_between(self) -> float:
        """Likewise in seconds, where a time budget counts."""
        return self.sync_s / self.fragments

    def mixing(self, asked: object) -> float:
        """How much of the local parameters remains in a merge; None: what is good for the delay.

        Raises:
            TypeError, ValueError: it can't be used; the message says why.
        """
        if asked is None:
            return 0.5 if 0 < self.delay < (self.sync_steps or math.inf) else 0.0
        return check_amount("mixing", asked, 1.0)


def schedule(sync_every: int | str, fragments: int, delay: int) -> Schedule:
    """Check what a program asks for.

    Args:
        sync_every: inner steps, or a time budget such as ``"30s"``, ``"500ms"``, ``"2min"``.
        fragments: 1 or more.
        delay: in inner steps; from 0 to ``sync_every``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: one out of range; the message says what is possible.
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
            f"fragments must be at most sync_every ({sync_every}), so that at most one of them is "
            f"due in an inner step, not {fragments}"
        )
    if delay > sync_every:
        raise ValueError(
            f"delay must be at most sync_every ({sync_every}): a fragment is merged before it is "
            f"reduced again; not {delay}"
        )
    return Schedule(fragments, sync_every, 0.0, delay)


def partition(sizes: Sequence[int], fragments: int, order: str) -> tuple[tuple[int, ...], ...]:
    """Spread parameters over fragments, none of them empty, of about the same number of elements.

    ``sequential``: runs of neighbours. ``strided``: dealt out like cards, so that each fragment has
    some of all depths (arXiv:2501.18512, section 2.2, for the layers of a transformer). Every P-th
    one would not do: where P divides the number of tensors in a layer, all the large ones end up in
    the same fragments. So the largest come first, and each goes to the fragment that has least.

    Args:
        sizes: elements of each parameter.
        fragments: how many are wanted.
        order: one of ``ORDERS``.

    Returns:
        For each fragment the indices of its parameters, ascending.

    Raises:
        ValueError: no such order, or fewer parameters than fragments.
    """
    if order not in ORDERS:
        raise ValueError(f"fragment_order must be 'strided' or 'sequential', not {order!r}")
    if len(sizes) < fragments:
        raise ValueError(
            f"fragments must be at most {len(sizes)}, the number of parameter tensors, not "
            f"{fragments}"
        )
    if order == "strided":
        return _dealt(sizes, fragments)
    parts: list[tuple[int, ...]] = []
    left, begin = sum(sizes), 0
    for number in range(fragments):
        goal, end, taken = left / (fragments - number), begin, 0
        last = len(sizes) - (fragments - number - 1)  # one each for those that follow
        while end < last and (end == begin or taken + sizes[end] / 2 <= goal):
            taken += sizes[end]
            end += 1
        if number == fragments - 1:
            end = len(sizes)
        parts.append(tuple(range(begin, end)))
        begin, left = end, left - taken
    return tuple(parts)


def _dealt(sizes: Sequence[int], fragments: int) -> tuple[tuple[int, ...], ...]:
    hands: list[list[int]] = [[] for _ in range(fragments)]
    held = [0] * fragments
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        turn = min(range(fragments), key=lambda hand: (held[hand], len(hands[hand])))
        hands[turn].append(index)
        held[turn] += sizes[index]
    return tuple(tuple(sorted(hand)) for hand in hands)
