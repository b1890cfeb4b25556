"""What must hold when processes train, written apart from the code that it checks.

* After a round all members of it hold the same outer parameters and the same ledger, bit for bit:
  those before it, less what the contributors that its outcome names have put in. Its number is the
  one after the last.
* After a synchronization all hold what one of them had. While there is the same master, nobody who
  has never been in the run makes it begin anew.
* No inner step is in any outer parameters more than once, whoever has made it.
* Every inner step of a process that lives is, in each fragment, in the outer parameters that it
  has taken over, or in flight, or still between its base and its parameters; or it was made while
  a round was under way that it merged, and given up for what came of that, as the mode has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.bindings.diloco.ledger import Ledger
from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers import InRun, Violation
from pccl.stress.sim.toy_model import PLACES, ToyOuter, ToyReplica, Whole, digit, places_of, whole
from pccl.stress.sim.training import Training

_ROUNDS_TOLD = 16
"""Of so many rounds the ledger tells whose work is in them."""

Contents = tuple[bytes, ...]
"""Of outer parameters by fragment, and of the ledger."""


class TrainingCheckers:
    """Hears of everything that the processes of one run train.

    Args:
        training: what they do.
        axes: as many processes may there be.
        done: counts what has happened.
    """

    def __init__(self, training: Training, axes: int, done: Counter[str]) -> None:
        self.axes = axes
        self._training = training
        self._done = done
        self._made: list[Whole] = []
        """By axis: the digits of the inner steps that its process has made."""
        self._given_up: dict[tuple[int, int], Whole] = {}
        """By axis and fragment."""
        self._merged: dict[tuple[int, int], Whole] = {}
        """Likewise: the work in the outer parameters that its process has taken over last."""
        self._offered: dict[InRun, dict[PeerId, Contents]] = {}
        self._synced: dict[InRun, Contents] = {}
        self._known: dict[bytes, dict[Contents, int]] = {}
        """What members of a run have synchronized, and a number that tells when last."""
        self._advanced: set[bytes] = set()
        """Runs in which a revision above 0 was synchronized, as far as the master must know."""
        self._rounds: dict[InRun, tuple[Contents, Contents]] = {}
        """Before and after."""
        self._parents: dict[Contents, Contents] = {}

    # -- what all have -----------------------------------------------------------------------------

    def claim_axis(self) -> int:
        """A process begins to train."""
        self._made.append(np.zeros(PLACES, np.int64))
        assert len(self._made) <= self.axes
        return len(self._made) - 1

    def master_restarted(self) -> None:
        """It knows what those know who are left."""
        self._advanced.clear()

    def offered(self, operation: InRun, peer: PeerId, contents: Contents) -> None:
        """A member takes part in a synchronization with this."""
        self._offered.setdefault(operation, {})[peer] = contents

    def synced(
        self,
        who: str,
        operation: InRun,
        members: tuple[PeerId, ...],
        revision: int,
        contents: Contents,
    ) -> None:
        """A synchronization of these returned."""
        self._done["training sync"] += 1
        offered, now = self._offered[operation], _closed(contents)
        known = self._known.setdefault(operation.run, {})
        if contents not in offered.values():
            raise Violation(f"{who}: nobody had what came of {operation}")
        if operation not in self._synced:
            for peer in members:
                had = _closed(offered[peer])
                newer = known.get(had, -1) > known.get(now, -1)
                if newer and self._descends(had, now):
                    raise Violation(f"{who}: {operation} has taken back what peer {peer} had")
            known[now] = len(self._synced)
            if operation.run in self._advanced and not revision:
                raise Violation(f"{who}: {operation} has begun the run anew")
            if revision:
                self._advanced.add(operation.run)
        if self._synced.setdefault(operation, contents) != contents:
            raise Violation(f"{who}: {operation} brought others something else")

    def committed(
        self,
        who: str,
        operation: InRun | None,
        number: int,
        contributed: Sequence[Whole],
        before: Contents,
        outer: ToyOuter,
    ) -> None:
        """A round is over.

        Args:
            who: has applied it.
            operation: its reduce; None: it was alone.
            number: of the round.
            contributed: what those have put in whom the outcome names.
            before: what it held before.
            outer: what it holds now.
        """
        self._done["round" if operation else "round alone"] += 1
        after = outer.contents()
        if operation is not None and self._rounds.setdefault(operation, (before, after)) != (
            before,
            after,
        ):
            raise Violation(f"{who}: not alike before or after round {number} ({operation})")
        if (_number(before), _number(after)) != (number, number + 1):
            raise Violation(f"{who}: round {number} made {_number(after)} of {_number(before)}")
        fragment = number % self._training.fragments
        for index, values in enumerate(outer.values):
            expected = np.frombuffer(before[index], np.int64).copy()
            if index == fragment:
                expected -= sum(contributed, start=np.zeros_like(expected))
            if expected.tobytes() != values.tobytes():
                raise Violation(f"{who}: round {number} has not taken away what was contributed")
            self._check_once(who, index, values)
        self._parents.setdefault(_closed(after), _closed(before))

    def _check_once(self, who: str, fragment: int, values: Whole) -> None:
        for axis, made in enumerate(self._made):
            applied = -values[places_of(axis)]
            if np.any(applied & ~made):
                raise Violation(
                    f"{who}: fragment {fragment} has work of axis {axis} in it that was not done, "
                    f"or twice: {applied.tolist()} of {made.tolist()}"
                )

    # -- what one has ------------------------------------------------------------------------------

    def stepped(self, axis: int, number: int) -> None:
        """A process has made an inner step."""
        place, value = digit(number)
        self._made[axis][place] += value

    def given_up(self, who: str, axis: int, fragment: int, work: Whole) -> None:
        """A process has merged a round, and what it has done since it began is left out."""
        own = work[places_of(axis)]
        steps = sum(bin(int(value)).count("1") for value in own)
        if steps > self._training.delay:
            raise Violation(f"{who}: {steps} inner steps were given up for one round")
        self._given_up[axis, fragment] = self._left_out(axis, fragment) + own

    def accounts(self, who: str, replica: ToyReplica, fragment: int, common: Whole) -> None:
        """A process holds these outer parameters of a fragment: is all its work somewhere?"""
        missing = self._missing(replica, fragment, common)
        if np.any(missing):
            raise Violation(
                f"{who}: of fragment {fragment} is lost, or there twice: {missing.tolist()}"
            )
        self._merged[replica.axis, fragment] = -common[places_of(replica.axis)]

    def entered(
        self,
        who: str,
        replica: ToyReplica,
        before: Contents,
        now: Contents,
        taken: dict[int, Whole],
        *,
        was_cut_off: bool,
    ) -> None:
        """A process came (back) into the run, and has anchored its work to what is there.

        The run may have gone on without all who held what this one has held. Then the work that
        it had merged is lost with that; what it had not is not. And what it had in flight so long
        ago that the ledger does not tell any more counts as applied.

        Args:
            who: did.
            replica: its own.
            before: what it held before.
            now: what it holds now.
            taken: what it had in flight, by number of the round.
            was_cut_off: it has lost its place.
        """
        self._done["entered"] += 1
        gone = not self._descends(_closed(now), _closed(before))
        if gone and not was_cut_off:
            raise Violation(f"{who}: what it held before round {_number(before)} is gone")
        self._done["run given up"] += gone
        for fragment, content in enumerate(now[:-1]):
            common = np.frombuffer(content, np.int64)
            if gone:
                axis = replica.axis
                merged = self._merged.get((axis, fragment), np.zeros(PLACES, np.int64))
                lost = merged & ~-common[places_of(axis)]
                self._given_up[axis, fragment] = self._left_out(axis, fragment) + lost
            self._forget_old(replica, fragment, common, _number(now), taken)
            self.accounts(who, replica, fragment, common)

    def _forget_old(
        self,
        replica: ToyReplica,
        fragment: int,
        common: Whole,
        number: int,
        taken: dict[int, Whole],
    ) -> None:
        mine = places_of(replica.axis)
        for old, work in taken.items():
            if old % self._training.fragments == fragment and old + _ROUNDS_TOLD < number:
                missing = np.maximum(self._missing(replica, fragment, common), 0)
                lost = work[mine] & missing  # what was never sent is not: it is carried
                key = replica.axis, fragment
                self._given_up[key] = self._left_out(*key) + lost
                self._done["doubt too old"] += bool(np.any(lost))

    def _descends(self, contents: Contents, ancestor: Contents) -> bool:
        while contents != ancestor:
            if contents not in self._parents:
                return False
            contents = self._parents[contents]
        return True

    def _missing(self, replica: ToyReplica, fragment: int, common: Whole) -> Whole:
        count = self._training.fragments
        flying = [work for n, work in replica.taken.items() if n % count == fragment]
        work = sum(flying, start=replica.work(fragment))
        mine = places_of(replica.axis)
        if np.any(work[: mine.start]) or np.any(work[mine.stop :]):
            raise Violation(f"axis {replica.axis}: it carries work of others")
        there: Whole = work[mine] - common[mine] + self._left_out(replica.axis, fragment)
        return self._made[replica.axis] - there

    def _left_out(self, axis: int, fragment: int) -> Whole:
        return self._given_up.get((axis, fragment), np.zeros(PLACES, np.int64))


def contribution(content: npt.NDArray[Any], weight: float) -> Whole:
    """What a member has put in, from what it gave to the reduce."""
    return whole(content.astype(np.float64) * weight)


def _number(contents: Contents) -> int:
    return int(np.frombuffer(contents[-1], np.int64)[0])


def _closed(contents: Contents) -> Contents:
    """The same before the round was opened."""
    record = np.frombuffer(contents[-1], np.int64).copy()
    ledger = Ledger(record)
    if ledger.is_open:
        record[1] = 0
    return (*contents[:-1], record.tobytes())
