"""Outcomes and answers: one peer acknowledges them, and keeps them until all members have them.

If the master dies or is unreachable, peers report the outcomes they know to the next master. So all
members get the same outcome. A proposal alone is not an outcome yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.membership import KnownMembership, PeerIdentity
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import ACKNOWLEDGED_BATCH_MAX, PROGRESS_BATCH_MAX, Timing
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.status_report import Figures
from pccl.protocol.types import OperationId, RoundId


@dataclass(frozen=True, slots=True)
class _Final:
    final: msg.OperationEnded | msg.RoundClosed
    told: bool
    """Whether the master has decided this; otherwise this is only a proposal."""
    expected: Expected = NOTHING_EXPECTED


class Heartbeats:
    """Sends the heartbeats of one peer, with the outcomes and answers that each acknowledges.

    Args:
        timing: deadlines.
        now_ns: current time.
        out: for messages.
        own: this peer.
        membership: the rosters that have arrived.
    """

    def __init__(
        self,
        timing: Timing,
        now_ns: int,
        out: PeerOutbox,
        own: PeerIdentity,
        membership: KnownMembership,
    ) -> None:
        self._out, self._own, self._membership = out, own, membership
        self._interval_ns = timing.ns(timing.heartbeat_s)
        self._last_ns = now_ns
        self._operations: list[OperationId] = []
        self._rounds: list[RoundId] = []
        self._blocked: bool = False
        """``blocked`` of the last heartbeat."""
        self.reports: tuple[int, float | None, Figures] = 0, None, ()
        """What the program reports: its step, the loss, and other numbers."""
        self._stored_place = 0
        """Place up to which this peer has stored the proposals of its master."""

    def tick(self, progress: tuple[msg.Progress, ...], now_ns: int, *, blocked: bool) -> None:
        """Send a heartbeat if one is due, or if ``blocked`` has changed."""
        due = now_ns - self._last_ns >= self._interval_ns or blocked != self._blocked
        if due and self._own.is_registered and self._out.reaches_master:
            self._last_ns, self._blocked = now_ns, blocked
            self.send(progress, now_ns)

    def send(self, progress: tuple[msg.Progress, ...] = (), sent_ns: int = 0) -> None:
        """Send a heartbeat, split into several messages if there is much to acknowledge.

        With ``sent_ns``, the time now, the master's answer tells how the clocks differ.
        """
        if not self._out.reaches_master:
            return
        operations, self._operations = tuple(self._operations), []
        rounds, self._rounds = tuple(self._rounds), []
        size, acknowledged = PROGRESS_BATCH_MAX, ACKNOWLEDGED_BATCH_MAX
        longest = max(len(operations), len(rounds))
        for i in range(max(1, -(-len(progress) // size), -(-longest // acknowledged))):
            beat = msg.Heartbeat(
                progress[i * size : (i + 1) * size],
                operations[i * acknowledged : (i + 1) * acknowledged],
                rounds[i * acknowledged : (i + 1) * acknowledged],
                self._blocked,
                self._membership.version,
                self._own.term,
                self._stored_place,
                *self.reports,
                sent_ns if i == 0 else 0,
            )
            self._out.send(beat)

    def acknowledge(self, final: OperationId | RoundId) -> None:
        """Acknowledge an outcome or an answer in the next heartbeat.

        If a batch is full, the heartbeat is sent at once.
        """
        if isinstance(final, RoundId):
            self._rounds.append(final)
        else:
            self._operations.append(final)
        if len(self._operations) + len(self._rounds) >= ACKNOWLEDGED_BATCH_MAX:
            self.send()

    def stored(self, place: int) -> None:
        """Acknowledge at once, in a heartbeat, that all proposals up to ``place`` are stored."""
        self._stored_place = max(self._stored_place, place)
        self.send()

    def follows_another(self) -> None:
        """Reset the stored place, because this peer follows another master or another term."""
        self._stored_place = 0


class SeenFinals:
    """The outcomes and answers that one peer keeps, by their place among all decisions of the run.

    Args:
        membership: records which rosters the decisions ratify.
    """

    def __init__(self, membership: KnownMembership) -> None:
        self._membership = membership
        self._seen: dict[int, _Final] = {}
        self._settled = 0

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, final: msg.OperationEnded | msg.RoundClosed) -> None:
        """Keep an outcome or answer that the master sent, perhaps for the second time."""
        if final.roster_version > self._membership.ratified:
            self._membership.ratify(final.roster_version)
        known = self._known(final)
        expected = known.expected if known is not None else NOTHING_EXPECTED
        self._keep(_Final(final, told=True, expected=expected))

    def store(self, message: msg.Proposed) -> int:
        """Keep a proposal, perhaps a repeated one; return the place up to which all are kept."""
        final = message.outcome or message.answer
        if message.outcome and message.answer:
            reason = "the master proposed two decisions in one message"
            raise errors.RemoteProtocolError(func="control", reason=reason)
        if final is None:  # the master only asks if this peer follows it
            return message.place
        known = self._known(final)
        told = known is not None and known.told
        self._keep(_Final(final, told, message.expected))
        return message.place

    def _known(self, final: msg.OperationEnded | msg.RoundClosed) -> _Final | None:
        """Return the same decision, if it is kept; another master may have reused its place."""
        known = self._seen.get(final.sequence)
        return known if known is not None and _subject(known.final) == _subject(final) else None

    def _keep(self, final: _Final) -> None:
        place = final.final.sequence
        if place >= self._settled and place:
            self._seen[place] = final

    def follows_another(self) -> None:
        """Keep all decisions from now on, until this peer's new master calls them settled.

        That master does not know decisions that all members have, and may use their places again.
        """
        self._settled = 0

    def settle(self, sequence: int) -> None:
        """Forget decisions before place ``sequence``, because all members have them."""
        if sequence <= self._settled:
            return
        self._settled = sequence
        self._seen = {place: final for place, final in self._seen.items() if place >= sequence}

    def report(self) -> Iterator[msg.KnownOutcome | msg.KnownAnswer]:
        """Yield the reports for another master, in the order of the decisions."""
        for _, known in sorted(self._seen.items(), key=lambda item: item[0]):
            if isinstance(known.final, msg.OperationEnded):
                yield msg.KnownOutcome(known.final, known.told, known.expected)
            else:
                yield msg.KnownAnswer(known.final, known.told)

    def clear(self) -> None:
        """Forget all decisions, because this peer leaves the run."""
        self._seen.clear()
        self._settled = 0


def _subject(final: msg.OperationEnded | msg.RoundClosed) -> OperationId | RoundId:
    return final.operation if isinstance(final, msg.OperationEnded) else final.round
