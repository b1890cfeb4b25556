"""The effects of ``Rounds``: the calls that it asks for, their results, and its notices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Join the run; fetch the shared state meanwhile. Result: ``Members``.

    Attributes:
        again: whether to leave the run first, because this replica lacks results of it.
    """

    again: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Call ``update_topology``. Result: ``Members``."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Call ``sync_shared_state``. Result: the ``Members`` that now have equal states.

    A new replica without a checkpoint offers revision 0. A run that has a later revision never
    continues from revision 0.
    """


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for the next pseudo-gradient. Result: a ``Contribution``, or None to end.

    Attributes:
        or_newcomers: whether the result may also be ``NewcomersWait``.
    """

    or_newcomers: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """Average the contributions of all members that remain. Result: ``Average``."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class ReduceBuffers:
    """Sum the buffers of all members that remain, in place. It comes before the ``Reduce``.

    Attributes:
        sums: the buffers of this replica; see ``Contribution.buffers``.
        leads: whether this replica gives the buffers that are not averaged.
    """

    sums: Any = field(repr=False)
    leads: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for some time. Result: True to give up, because the program is closing.

    Attributes:
        seconds: duration of the pause.
        why: reason, for the log; empty: too few members.
    """

    seconds: float
    why: str = ""


Effect = Connect | Update | Sync | Take | Reduce | ReduceBuffers | Pause

# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Members:
    """The members of the group.

    Attributes:
        peer: id of this replica.
        ids: ids of all members, in ring order.
        is_whole: whether all replicas that consist of several peers are complete.
        run: id of the run, after a synchronization.
    """

    peer: int
    ids: tuple[int, ...]
    is_whole: bool = True
    run: bytes = b""


@dataclass(frozen=True, slots=True)
class NewcomersWait:
    """Newcomers are ready to be admitted, and there is no pseudo-gradient yet."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The pseudo-gradient of one replica for one round.

    Attributes:
        number: number of the round.
        fragment: fragment of the model.
        weight: weight of the work; 0.0: no work was done.
        values: the pseudo-gradient, shape (n,), float32; with ``Reduce``, other memory for the
            average, so the replica still has its work. The simulator uses another type.
        entry: number of the replica's entry; contributions of earlier entries are dropped.
        buffers: the buffers of the model, weighted, as something to add up; after the round the
            common buffers. None: no buffers go with this fragment.
        norm: L2 norm of the pseudo-gradient.
    """

    number: int
    fragment: int
    weight: float
    values: Any = field(repr=False)
    entry: int
    buffers: Any = field(default=None, repr=False)
    norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Average:
    """Facts about an average, whose values are in ``Contribution.values``.

    Attributes:
        contributors: ids of the members in the average, without those that the guard excluded.
        total_weight: sum of their weights.
        tx_bytes: bytes that this replica sent.
        rx_bytes: bytes that this replica received.
        is_excluded: whether the guard has excluded the work of this replica.
        workers: ids of the members whose work is in the average; None: all contributors.
        product: dot product of this replica's work and the average; NaN if it has no work in it.
        replicas: how many of equal weights would average noise as well as these do.
        took_part: whether the work of this replica is in the average; False: it came too late.
        shares: for each member of the reduce its id and weight; 0.0 if the guard excluded it.
    """

    contributors: tuple[int, ...]
    total_weight: float
    tx_bytes: int = 0
    rx_bytes: int = 0
    is_excluded: bool = False
    workers: tuple[int, ...] | None = None
    product: float = math.nan
    replicas: float = 1.0
    took_part: bool = True
    shares: tuple[tuple[int, float], ...] = ()


# -- notices for the replica ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entered:
    """The replica has the outer parameters of the run, for the first time or again.

    Attributes:
        entry: number of the entry, from 1.
        number: number of the open round, or else of the next one.
        is_open: whether the members have begun that round; then this replica contributes zeros.
        applied: rounds of the previous entry whose outer step contains this replica's work. The
            outer parameters do not contain its work of other unmerged rounds.
        corrected: fragments with a round whose outcome differs from this replica's record. The
            compression residuals of these fragments are wrong.
        is_reset: whether the replica drops all local work, because the guard has excluded some.
    """

    entry: int
    number: int
    is_open: bool
    applied: tuple[int, ...]
    corrected: tuple[int, ...] = ()
    is_reset: bool = False


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """A round is over; ``contribution.values`` now holds the outer parameters of its fragment."""

    contribution: Contribution
    average: Average
    norms: tuple[float, float]
    """L2 norms of the average and of the outer step."""
    outer_state: Any = field(default=None, repr=False)
    """What ``Outer.copy`` returned."""


Notice = Entered | RoundCommitted | Members
