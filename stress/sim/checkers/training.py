"""What must hold when processes train, written apart from the code that it checks.

* After a round all members of it hold the same outer parameters and the same ledger, bit for bit:
  those before it, less what the contributors that its outcome names have put in. Its number is the
  one after the last.
* After a synchronization all hold what one of them had: what the steady members have, those that
  were never cut off since they came; if there is none, nobody has gone on from there. Only that the
  steady members had opened a round may be taken back: others have what all had before, and nobody
  has put work in yet. While there is the same master, nobody who has never been in the run makes it
  begin anew.
* No inner step is in any outer parameters more than once, whoever has made it.
* Who ends with a period, and was not cut off since its last inner step, has no work left.
* Every inner step of a process that lives is, in each fragment, in the outer parameters that it
  has taken over, or in flight, or still between its base and its parameters; or it was made while
  a round was under way that it merged, and given up for what came of that, as the mode has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.bindings.diloco.ledger import Ledger
from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.checkers.outcomes import InRun, Violation
from pccl.stress.sim.checkers.residual import ResidualCheckers
from pccl.stress.sim.workloads.toy_model import (
    PLACES,
    ToyOuter,
    ToyReplica,
    Whole,
    digit,
    places_of,
    whole,
)
from pccl.stress.sim.workloads.training_plan import TrainingPlan

_ROUNDS_TOLD = 16
"""Of so many rounds the ledger tells whose work is in them."""

Contents = tuple[bytes, ...]
"""Of outer parameters by fragment, and of the ledger."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What a member comes with to a synchronization.

    Attributes:
        contents: what it holds.
        line: that it has been in without interruption since the last one; None: in none.
    """

    contents: Contents
    line: int | None


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds, and the line that it is in; 0: in none."""

    contents: Contents
    line: int = 0


class TrainingCheckers:
    """Hears of everything that the processes of one run train.

    Args:
        training: what they do.
        axes: as many processes may there be.
        done: counts what has happened.
        excuses: what was done to the master.
    """

    def __init__(
        self, training: TrainingPlan, axes: int, done: Counter[str], excuses: Excuses
    ) -> None:
        self.axes = axes
        self._training = training
        self._done = done
        self._excuses = excuses
        self.residuals = ResidualCheckers(done)
        self._made: list[Whole] = []
        """By axis: the digits of the inner steps that its process has made."""
        self._given_up: dict[tuple[int, int], Whole] = {}
        """By axis and fragment."""
        self._in_doubt: dict[int, int] = {}
        """By axis: the round that its process reduces, or was cut off in."""
        self._merged: dict[tuple[int, int], Whole] = {}
        """Likewise: the work in the outer parameters that its process has taken over last."""
        self._offered: dict[InRun, dict[PeerId, Offered]] = {}
        self._synced: dict[InRun, tuple[Contents, int]] = {}
        """What came of each, and the line that it belongs to."""
        self._advanced: dict[bytes, tuple[int, int]] = {}
        """Run -> term and view in which a revision above 0 was first synchronized, as far as the
        master must know."""
        self._rounds: dict[InRun, tuple[Contents, Contents]] = {}
        """Before and after."""
        self._parents: dict[Contents, Contents] = {}
        self._by_line: dict[tuple[int, int], Contents] = {}
        """By line and number of a round, what it came to."""
        self._steady: dict[tuple[bytes, PeerId], int] = {}
        """The line that each member is in, by its run and id."""
        self._lines = 0
        """Whenever a run begins, or goes on without any steady member, another one begins."""

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
        line = self._steady.get((operation.run, peer))
        self._offered.setdefault(operation, {})[peer] = Offered(contents, line)

    def synced(
        self,
        who: str,
        operation: InRun,
        peer: PeerId,
        members: tuple[PeerId, ...],
        revision: int,
        contents: Contents,
    ) -> int:
        """A synchronization of these returned to one of them.

        Returns:
            The line that all are in now: it goes on as long as there is a steady member.
        """
        self._done["training sync"] += 1
        offered = self._offered[operation]
        if contents not in (one.contents for one in offered.values()):
            raise Violation(f"{who}: nobody had what came of {operation}")
        if operation not in self._synced:
            line = self._line(who, operation, {peer: offered[peer] for peer in members}, contents)
            self._synced[operation] = contents, line
            place = operation.operation.term, operation.operation.view
            advanced = self._advanced.get(operation.run)
            # Who was frozen may hear of its beginning when others, without it, have come further.
            begun_anew = advanced is not None and not revision and place >= advanced
            if begun_anew and not self._excuses.may_lack_majority:
                raise Violation(f"{who}: {operation} has begun the run anew")
            if revision:
                self._advanced.setdefault(operation.run, place)
        known, line = self._synced[operation]
        if known != contents:
            raise Violation(f"{who}: {operation} brought others something else")
        self._steady[operation.run, peer] = line  # who is cut off comes back under another id
        return line

    def _line(
        self, who: str, operation: InRun, offered: dict[PeerId, Offered], contents: Contents
    ) -> int:
        steady = {one.line for one in offered.values() if one.line is not None}
        for peer, one in offered.items():
            had, now = _closed(one.contents), _closed(contents)
            if one.line is not None and contents not in (one.contents, had):
                raise Violation(f"{who}: {operation} has taken from peer {peer} what it had")
            if not steady and had != now and self._descends(had, now):
                raise Violation(f"{who}: {operation} has taken back what peer {peer} had")
        if len(steady) > 1:
            raise Violation(f"{who}: members of {operation} come from lines {steady}")
        self._done["round called off"] += any(
            one.line is not None and one.contents != contents for one in offered.values()
        )
        self._lines += not steady
        return steady.pop() if steady else self._lines

    def committed(
        self,
        who: str,
        operation: InRun | None,
        number: int,
        contributed: Sequence[Whole],
        before: Held,
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
        after, was = outer.contents(), before.contents
        if operation is not None and self._rounds.setdefault(operation, (was, after)) != (
            was,
            after,
        ):
            raise Violation(f"{who}: not alike before or after round {number} ({operation})")
        if (_number(was), _number(after)) != (number, number + 1):
            raise Violation(f"{who}: round {number} made {_number(after)} of {_number(was)}")
        known = self._by_line.setdefault((before.line, number), after)
        if known != after and not self._excuses.was_master_restarted:
            raise Violation(f"{who}: round {number} of line {before.line} has two outcomes")
        fragment = number % self._training.fragments
        for index, values in enumerate(outer.values):
            expected = np.frombuffer(was[index], np.int64).copy()
            if index == fragment:
                expected -= sum(contributed, start=np.zeros_like(expected))
            if expected.tobytes() != values.tobytes():
                raise Violation(f"{who}: round {number} has not taken away what was contributed")
            self._check_once(who, index, values)
        self._parents.setdefault(_closed(after), _closed(was))

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
        place, value = digit(number, self._training.digits)
        self._made[axis][place] += value

    def reduces(self, axis: int, number: int) -> None:
        """A process puts work into a round."""
        self._in_doubt[axis] = number

    def saw_end(self, axis: int) -> None:
        """It has seen the round committed."""
        self._in_doubt.pop(axis, None)

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

    def finished(self, who: str, replica: ToyReplica) -> None:
        """A process has ended with a period, and was there since its last step."""
        self._done["finished"] += 1
        for fragment, part in enumerate(replica.parts):
            if np.any(part.work()):
                raise Violation(f"{who}: work in fragment {fragment} is left over at the end")

    def entered(
        self,
        who: str,
        replica: ToyReplica,
        before: Held,
        now: Held,
        taken: dict[int, Whole],
    ) -> None:
        """A process came (back) into the run, and has anchored its work to what is there.

        The line may have ended meanwhile, because no member was left that was not cut off. What
        this process had merged, and the line that it is in now lacks, is lost then; what it had not
        merged is not. Nor, where a master was started anew, need a line hold what only those have
        seen that it went on without. And what was in flight so long ago that the ledger does not
        tell any more counts as applied.

        Args:
            who: did.
            replica: its own.
            before: what it held before.
            now: what it holds now.
            taken: what it had in flight, by number of the round.
        """
        self._done["entered"] += 1
        gone = not self._descends(_closed(now.contents), _closed(before.contents))
        if gone and before.line == now.line and not self._excuses.was_master_restarted:
            raise Violation(
                f"{who}: what it held before round {_number(before.contents)} is gone, and the "
                f"members go on with round {_number(now.contents)}"
            )
        self._done["run given up"] += gone
        for fragment, content in enumerate(now.contents[:-1]):
            common = np.frombuffer(content, np.int64)
            if gone:
                axis = replica.axis
                merged = self._merged.get((axis, fragment), np.zeros(PLACES, np.int64))
                lost = merged & ~-common[places_of(axis)]
                self._given_up[axis, fragment] = self._left_out(axis, fragment) + lost
            self._forget_old(replica, fragment, common, _number(now.contents), taken)
            applied = self._applied(replica, fragment, common, _number(now.contents), taken)
            self.residuals.settled(replica.axis, fragment, applied, gone=gone)
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
        old = self._in_doubt.get(replica.axis)
        if old is None or old % self._training.fragments != fragment:
            return
        del self._in_doubt[replica.axis]
        if old in taken and old + _ROUNDS_TOLD < number:
            lost = taken[old][mine] & ~-common[mine]
            key = replica.axis, fragment
            self._given_up[key] = self._left_out(*key) + lost
            self._done["doubt too old"] += bool(np.any(lost))

    def _applied(
        self,
        replica: ToyReplica,
        fragment: int,
        common: Whole,
        number: int,
        taken: dict[int, Whole],
    ) -> dict[int, bool]:
        """Whether what was in flight is in the outer parameters, or counts as that."""
        mine = places_of(replica.axis)
        return {
            old: old + _ROUNDS_TOLD < number or not np.any(work[mine] & ~-common[mine])
            for old, work in taken.items()
            if old % self._training.fragments == fragment and np.any(work)
        }

    def _descends(self, contents: Contents, ancestor: Contents) -> bool:
        while contents != ancestor:
            if contents not in self._parents:
                return False
            contents = self._parents[contents]
        return True

    def _missing(self, replica: ToyReplica, fragment: int, common: Whole) -> Whole:
        count = self._training.fragments
        flying = [work for n, work in replica.taken.items() if n % count == fragment]
        work = sum(flying, start=replica.parts[fragment].work())
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
