"""``TrainingCheckers``: checks rounds, synchronizations and the work of processes that train.

* After a round all its members hold the same outer parameters and ledger, bit for bit. These are
  the old parameters, minus the work of the contributors in the outcome. Round numbers have no gaps.
* After a synchronization all members hold what one of them held. They hold the contents of the
  steady members, which were not cut off since they joined. Without a steady member, they do not go
  back to older contents. A synchronization may only revert an opened round, to which no member has
  contributed. As long as the master lives, no newcomer begins the run again.
* A late process receives the inner steps of another one, unless no member has offered them.
* No outer parameters contain an inner step twice.
* A process that ends with a period, and was not cut off since its last step, has no work left.
* Every inner step of a live process counts once in each fragment. It is in the outer parameters
  that the process merged, in its work in flight, or in the difference of base and parameters. Or
  the process dropped it: by merging a round in flight, as the mode allows, or after a guard.
* The weight of a contribution is that of the inner steps in it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.bindings.diloco.ledger import Ledger
from pccl.bindings.diloco.rounds import Contribution
from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.checkers.residual import ResidualCheckers
from pccl.stress.sim.checkers.samples import SampleCheckers
from pccl.stress.sim.workloads.toy_model import (
    PLACES,
    ToyOuter,
    ToyReplica,
    Whole,
    digit,
    places_of,
    steps_in,
    whole,
)
from pccl.stress.sim.workloads.training_plan import TrainingPlan

_ROUNDS_TOLD = 16
"""Number of rounds whose contributors the ledger lists."""

Contents = tuple[bytes, ...]
"""Bytes of the outer parameters by fragment, and of the ledger."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What a member offers in a synchronization.

    Attributes:
        contents: contents that it holds.
        line: line in which it is steady since the last synchronization; None: it is not steady.
    """

    contents: Contents
    line: int | None


@dataclass(frozen=True, slots=True)
class Held:
    """Contents that a process holds, and the line that it is in; 0: no line."""

    contents: Contents
    line: int = 0


class TrainingCheckers:
    """Checks the training of all processes of one run.

    Args:
        training: the plan of the training.
        axes: maximum number of processes.
        done: counts of the run.
        excuses: reports what faults did to the master.
    """

    def __init__(
        self, training: TrainingPlan, axes: int, done: Counter[str], excuses: Excuses
    ) -> None:
        self.axes = axes
        self._training = training
        self._done = done
        self._excuses = excuses
        gathers = training.quantization.is_gathered
        self.samples = SampleCheckers(training.digits)
        self.residuals = ResidualCheckers(done, training.decay, is_gathered=gathers)
        self.saved: defaultdict[int, deque[Any]] = defaultdict(deque)
        """Group -> processes that have saved a checkpoint, until another one continues."""
        self.is_running: Callable[[int], bool] = lambda index: True
        """Whether the process with an index trains."""
        self.may_be_offered: set[int] = {0}
        """Numbers of inner steps that processes have had."""
        self._made: list[Whole] = []
        """By axis: digits of the inner steps that the process made."""
        self._given_up: dict[tuple[int, int], Whole] = {}
        """Axis and fragment -> digits of the work that the process gave up."""
        self._in_doubt: dict[int, int] = {}
        """Axis -> round that the process reduces, or in which it was cut off."""
        self._merged: dict[tuple[int, int], Whole] = {}
        """Axis and fragment -> own work in the outer parameters that the process merged last."""
        self._offered: dict[InRun, dict[PeerId, Offered]] = {}
        self._synced: dict[InRun, tuple[Contents, int]] = {}
        """Synchronization -> elected contents, and their line."""
        self._advanced: dict[tuple[bytes, int], tuple[int, int]] = {}
        """Run and group -> term and view of the first synchronization above revision 0 that the
        master must know."""
        self._rounds: dict[InRun, tuple[Contents, Contents]] = {}
        """Reduce of a round -> contents before and after the round."""
        self._parents: dict[Contents, Contents] = {}
        self._by_line: dict[tuple[int, int], Contents] = {}
        """Line and number of a round -> contents after it."""
        self._steady: dict[tuple[bytes, PeerId], int] = {}
        """Run and id of a member -> line in which it is steady."""
        self._lines = 0
        """Number of lines; a new line begins with a run, and when no steady member is left."""

    # -- rounds and lines --------------------------------------------------------------------------

    def claim_axis(self) -> int:
        """Return the axis of a process that begins to train."""
        self._made.append(np.zeros(PLACES, np.int64))
        assert len(self._made) <= self.axes
        return len(self._made) - 1

    def master_restarted(self) -> None:
        """Record that the new master knows only what the remaining members know."""
        self._advanced.clear()

    def offered(self, operation: InRun, peer: PeerId, contents: Contents) -> None:
        """Record the contents with which a member takes part in a synchronization."""
        line = self._steady.get((operation.run, peer))
        contents = contents[: self._training.fragments + 1]  # not a ledger of samples
        self._offered.setdefault(operation, {})[peer] = Offered(contents, line)

    def synced(
        self,
        who: str,
        operation: InRun,
        peer: PeerId,
        members: tuple[PeerId, ...],
        revision: int,
        before: Contents,
        contents: Contents,
    ) -> int:
        """Check a synchronization of ``members`` that returned to ``peer``.

        If ``peer`` was too late for it, it gets what the others elected. A steady peer has that
        already, or, if it was away for many rounds, an ancestor.

        Args:
            who: name of the process.
            operation: the synchronization.
            peer: id of the process.
            members: ids of the members in it.
            revision: revision that all have now.
            before: contents of the process before it.
            contents: contents of the process after it.

        Returns:
            The line of all members now: the line of the steady members, or else a new line.
        """
        self._done["training sync"] += 1
        offered = self._offered[operation]
        if contents not in (one.contents for one in offered.values()):
            raise Violation(f"{who}: {operation} gave contents that no member held")
        if operation not in self._synced:
            line = self._line(who, operation, {peer: offered[peer] for peer in members}, contents)
            self._synced[operation] = contents, line
            place = operation.operation.term, operation.operation.view
            scope = operation.run, operation.operation.group
            advanced = self._advanced.get(scope)
            # A frozen member may hear of the beginning when other members have advanced.
            begun_anew = advanced is not None and not revision and place >= advanced
            if begun_anew and not self._excuses.may_lack_majority:
                raise Violation(f"{who}: {operation} began the run again")
            if revision:
                self._advanced.setdefault(scope, place)
        known, line = self._synced[operation]
        if known != contents:
            raise Violation(f"{who}: {operation} gave other members other contents")
        if peer not in members:
            self._done["late training sync"] += 1
            steady = self._steady.get((operation.run, peer))
            if steady not in (None, line):
                raise Violation(f"{who}: {operation} is of line {line}, not {steady}")
            self._done["late training sync over many rounds"] += before != contents
            if steady is not None and not self._descends(_closed(contents), _closed(before)):
                raise Violation(f"{who}: {operation} reverted its contents, and it was steady")
        self._steady[operation.run, peer] = line  # after a cut it gets another id
        return line

    def lags(self, run: bytes, peer: PeerId) -> None:
        """Record that a member was told that it lacks results, so it is steady no longer."""
        self._steady.pop((run, peer), None)

    def _line(
        self, who: str, operation: InRun, offered: dict[PeerId, Offered], contents: Contents
    ) -> int:
        steady = {one.line for one in offered.values() if one.line}
        for peer, one in offered.items():
            had, now = _closed(one.contents), _closed(contents)
            if one.line is not None and contents not in (one.contents, had):
                raise Violation(f"{who}: {operation} changed the contents of steady peer {peer}")
            is_reverted = not steady and had != now and self._descends(had, now)
            if is_reverted and not self._is_abandoned(operation.run, had):
                raise Violation(f"{who}: {operation} reverted the contents of peer {peer}")
        if len(steady) > 1:
            raise Violation(f"{who}: steady members of {operation} have different lines {steady}")
        called_off = any(one.line and one.contents != contents for one in offered.values())
        self._done["round called off"] += called_off  # who brought the contents may be lost since
        brought = [one for one in self._offered[operation].values() if one.contents == contents]
        lines = steady or {one.line for one in brought if one.line}
        self._lines += not lines
        return min(lines, default=self._lines)

    def _is_abandoned(self, run: bytes, had: Contents) -> bool:
        """Whether members went on from older contents before, while no member had these."""
        synced = [_closed(one) for op, (one, _) in self._synced.items() if op.run == run][::-1]
        base: Contents | None = had
        while base is not None and base not in synced:  # rounds since a synchronization
            base = self._parents.get(base)
        if base is None:
            return False
        later = synced[: synced.index(base)]
        found = any(not self._descends(one, base) for one in later)
        self._done["abandoned rounds came back"] += found
        return found

    def committed(
        self,
        who: str,
        operation: InRun | None,
        number: int,
        contributed: Sequence[Whole],
        before: Held,
        outer: ToyOuter,
    ) -> None:
        """Check a round that a process applied.

        Args:
            who: name of the process.
            operation: reduce of the round; None: the process was alone.
            number: number of the round.
            contributed: work of each contributor in the outcome.
            before: contents and line before the round.
            outer: outer parameters after it.
        """
        self._done["round" if operation else "round alone"] += 1
        after, was = outer.contents(), before.contents
        if operation is not None and self._rounds.setdefault(operation, (was, after)) != (
            was,
            after,
        ):
            raise Violation(f"{who}: contents differ before or after round {number} ({operation})")
        if (_number(was), _number(after)) != (number, number + 1):
            raise Violation(f"{who}: round {number} led to {_number(after)} from {_number(was)}")
        known = self._by_line.setdefault((before.line, number), after)
        if known != after and not self._excuses.was_master_restarted:
            raise Violation(f"{who}: round {number} of line {before.line} has two outcomes")
        fragment = number % self._training.fragments
        for index, values in enumerate(outer.values):
            expected = np.frombuffer(was[index], np.int64).copy()
            if index == fragment:
                expected -= sum(contributed, start=np.zeros_like(expected))
            if expected.tobytes() != values.tobytes():
                raise Violation(f"{who}: round {number} did not subtract the contributed work")
            self._check_once(who, index, values)
        self._parents.setdefault(_closed(after), _closed(was))

    def _check_once(self, who: str, fragment: int, values: Whole) -> None:
        for axis, made in enumerate(self._made):
            applied = -values[places_of(axis)]
            halves = made >> 1 if self._training.mixing else 0
            if np.any(applied & ~(made | halves)) or np.any(applied & applied >> 1 & halves):
                raise Violation(
                    f"{who}: fragment {fragment} contains work of axis {axis} that was not done "
                    f"or is counted twice: {applied.tolist()} of {made.tolist()}"
                )

    def fetched(self, who: str, outer: ToyOuter) -> None:
        """Check the inner steps that a late process has received."""
        is_there, steps = outer.offered.tolist()
        self._done["inner state fetched" if is_there else "no inner state fetched"] += 1
        if steps not in self.may_be_offered or (steps and not is_there):
            raise Violation(f"{who}: it received {steps} inner steps, which no process has made")

    # -- one process -------------------------------------------------------------------------------

    def stepped(self, axis: int, number: int) -> None:
        """Record an inner step of a process."""
        place, value = digit(number, self._training.digits, self._training.unit)
        self._made[axis][place] += value

    def weighs(self, who: str, contribution: Contribution, weight: float, steps: int) -> None:
        """Check the weight of a contribution.

        Args:
            who: name of the process.
            contribution: what it puts into a round.
            weight: weight of each of its inner steps.
            steps: number of its inner steps so far.
        """
        if steps > PLACES * self._training.digits:
            return  # the last steps did nothing
        made = steps_in(contribution.values, self._training.unit)
        expected = weight * made
        self._done["halves contributed"] += made % 1 > 0
        if not math.isclose(contribution.weight, expected, abs_tol=1e-9):
            raise Violation(
                f"{who}: its work in round {contribution.number} weighs {contribution.weight:g} "
                f"instead of {expected:g}"
            )

    def reduces(self, axis: int, number: int) -> None:
        """Record that a process puts work into a round."""
        self._in_doubt[axis] = number

    def saw_end(self, axis: int) -> None:
        """Record that a process saw its round committed."""
        self._in_doubt.pop(axis, None)

    def given_up(
        self, who: str, axis: int, fragment: int, work: Whole, during: Iterable[int]
    ) -> None:
        """Record ``work`` that a process gave up by merging a round.

        Args:
            who: name of the process.
            axis: its axis.
            fragment: fragment of the round.
            work: the work.
            during: numbers of the inner steps that it made during the round.
        """
        own = work[places_of(axis)]
        steps = sum(bin(int(value)).count("1") for value in own)
        if steps > self._training.delay:
            raise Violation(f"{who}: it gave up {steps} steps for one round, more than the delay")
        allowed = np.zeros(PLACES, np.int64)
        for number in during:
            place, value = digit(number, self._training.digits, 3)
            allowed[place] |= value
        if np.any(own & ~allowed):
            raise Violation(f"{who}: it gave up steps from before the round in fragment {fragment}")
        self._given_up[axis, fragment] = self._left_out(axis, fragment) + own

    def accounts(self, who: str, replica: ToyReplica, fragment: int, common: Whole) -> None:
        """Check that no work of a process is lost or counted twice in a fragment."""
        if np.any(missing := self._missing(replica, fragment, common)):
            what = missing.tolist()
            raise Violation(f"{who}: work in fragment {fragment} is lost or counted twice: {what}")
        self._merged[replica.axis, fragment] = -common[places_of(replica.axis)]

    def finished(self, who: str, replica: ToyReplica) -> None:
        """Check that a process that ended with a period, and was not cut off, has no work left.

        Only work of a round that went on without the process is left, if no other round followed.
        """
        self._done["finished"] += 1
        for fragment, part in enumerate(replica.parts):
            if np.any(part.work()) and fragment not in replica.returned:
                raise Violation(f"{who}: work in fragment {fragment} is left over at the end")

    def entered(
        self,
        who: str,
        replica: ToyReplica,
        before: Held,
        now: Held,
        taken: dict[int, Whole],
        *,
        is_reset: bool,
    ) -> None:
        """Check a process that joined or rejoined the run, and moved its work to the new contents.

        Its line may have ended, because no steady member was left. Then the work that it had merged
        may be lost, but no other work. After a restart of the master, a line may also lack rounds
        that only the members left behind have seen. Work in doubt counts as applied if it is too
        old for the ledger.

        Args:
            who: name of the process.
            replica: its local parameters.
            before: contents and line before the entry.
            now: contents and line after it.
            taken: its work in flight, by number of the round.
            is_reset: whether it dropped its work, because a guard has excluded some.
        """
        self._done["entered"] += 1
        self._done["reset"] += is_reset
        for number in [number for number in taken if number in replica.flown]:
            key = replica.axis, number % self._training.fragments
            self._merged[key] |= taken.pop(number)[places_of(replica.axis)]
        gone = not self._descends(_closed(now.contents), _closed(before.contents))
        if gone and before.line == now.line and not self._excuses.was_master_restarted:
            raise Violation(
                f"{who}: the run lost its contents of round {_number(before.contents)}; the "
                f"members continue with round {_number(now.contents)}"
            )
        self._done["run given up"] += gone
        for fragment, content in enumerate(now.contents[:-1]):
            common = np.frombuffer(content, np.int64)
            if gone:
                axis = replica.axis
                merged = self._merged.get((axis, fragment), np.zeros(PLACES, np.int64))
                lost = merged & ~-common[places_of(axis)]
                self._given_up[axis, fragment] = self._left_out(axis, fragment) + lost
            old = self._forget_old(replica, fragment, common, _number(now.contents), taken)
            applied = self._applied(replica, fragment, common, old, taken)
            if is_reset:
                in_vain = [taken[old] for old, is_applied in applied.items() if not is_applied]
                dropped = sum(in_vain, start=replica.parts[fragment].given_up)
                there = self._left_out(replica.axis, fragment) + dropped[places_of(replica.axis)]
                self._given_up[replica.axis, fragment] = there
            self.residuals.settled(replica.axis, fragment, applied, gone=gone)
            self.accounts(who, replica, fragment, common)

    def _forget_old(
        self,
        replica: ToyReplica,
        fragment: int,
        common: Whole,
        number: int,
        taken: dict[int, Whole],
    ) -> int | None:
        """Return the round in doubt if it is too old for the ledger."""
        mine = places_of(replica.axis)
        old = self._in_doubt.get(replica.axis)
        if old is None or old % self._training.fragments != fragment:
            return None
        del self._in_doubt[replica.axis]
        is_forgotten = old in taken and old + _ROUNDS_TOLD < number
        if is_forgotten:
            lost = taken[old][mine] & ~-common[mine]
            self._given_up[replica.axis, fragment] = self._left_out(replica.axis, fragment) + lost
            self._done["doubt too old"] += bool(np.any(lost))
        return old if is_forgotten else None

    def _applied(
        self,
        replica: ToyReplica,
        fragment: int,
        common: Whole,
        forgotten: int | None,
        taken: dict[int, Whole],
    ) -> dict[int, bool]:
        """Return for each round in flight whether its work is applied, or counts as applied."""
        mine = places_of(replica.axis)
        return {
            old: old == forgotten or not np.any(work[mine] & ~-common[mine])
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
            raise Violation(f"axis {replica.axis}: it carries work of other processes")
        there: Whole = work[mine] - common[mine] + self._left_out(replica.axis, fragment)
        return self._made[replica.axis] - there

    def _left_out(self, axis: int, fragment: int) -> Whole:
        return self._given_up.get((axis, fragment), np.zeros(PLACES, np.int64))


def contribution(content: npt.NDArray[Any], weight: float) -> Whole:
    """Return the work of a member, from its input to the reduce and its weight."""
    return whole(content.astype(np.float64) * weight)


def _number(contents: Contents) -> int:
    return int(np.frombuffer(contents[-1], np.int64)[0])


def _closed(contents: Contents) -> Contents:
    """Return ``contents`` as they were before the members opened the round."""
    record = np.frombuffer(contents[-1], np.int64).copy()
    ledger = Ledger(record[: Ledger.SIZE])
    if ledger.is_open:
        record[1] = 0
    return (*contents[:-1], record.tobytes())
