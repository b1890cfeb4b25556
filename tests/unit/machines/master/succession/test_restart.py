"""A master that takes up a run from what returning members say, message by message."""

from __future__ import annotations

import hashlib
from itertools import count

import pytest

from pccl.machines.master.events import (
    Announce,
    AskMaster,
    CloseConnection,
    ConnectionClosed,
    ConnectionMessage,
    ConnectionOpened,
    ForgetRun,
    MasterAnswered,
    MasterEffect,
    MasterEvent,
    MasterTick,
    MasterUnanswered,
    Remember,
    SendTo,
    Warn,
)
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.origin import Origin
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.guards.allowance import Trust
from pccl.protocol.handshake import NO_RUN
from pccl.protocol.limits import PENDING_MAX, TERM_GAP, Timing
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import (
    AbortCause,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
)

SECOND = 1_000_000_000
RUN, OTHER_RUN = b"the run of these", b"quite other runs"
MASTER, NEXT = b"master A", b"master B"
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
UPDATE, PENDING = RoundKind.UPDATE_TOPOLOGY, RoundKind.PEERS_PENDING
OPTIMIZE = RoundKind.OPTIMIZE_TOPOLOGY
ONE, TWO, THREE = PeerId(1), PeerId(2), PeerId(3)
VERSION, VIEW = 7, 4
"""What the members of the run know before its master dies."""


def where(peer: int) -> Member:
    return Member(PeerId(peer), f"10.0.0.{peer}", 4000 + peer)


def roster(
    version: int, view: int, *peers: int, views: tuple[int, ...] | None = None, term: int = 1
) -> Roster:
    members = tuple(where(peer) for peer in peers)
    size = len(peers)
    return Roster(version, 0, view, members, views or (view,), size, 1, size, term)


def operation(n: int = 0, *, view: int = VIEW, term: int = 1, tag: int = 5) -> OperationId:
    return OperationId(term, 0, view, tag, n)


def ended(
    what: OperationId, abort: AbortCause | None = None, reason: str = "",
    contributors: tuple[int, ...] = (), version: int = VERSION, sequence: int = 0,
) -> msg.OperationEnded:  # fmt: skip
    peers = tuple(PeerId(peer) for peer in contributors)
    return msg.OperationEnded(what, abort, reason, peers, version, sequence)


JUMP = TERM_GAP + 0x010101
"""Of ids; the first random bytes of a test are ones."""


def token(peer: int) -> bytes:
    return bytes([(100 + peer) % 256] * 16)


def counts(update: int = 0, pending: int = 0, optimize: int = 0) -> tuple[msg.RoundCount, ...]:
    return (
        msg.RoundCount(UPDATE, update),
        msg.RoundCount(PENDING, pending),
        msg.RoundCount(OPTIMIZE, optimize),
    )


class Master:
    """A machine that was just started, and its clock. Peer n speaks on connection n."""

    def __init__(
        self,
        origin: Origin = Origin.BLANK,
        term: int = 1,
        standbys: tuple[msg.MasterAddress, ...] = (),
        incumbent: bytes = NEXT,
        vouched: Vouched = NOT_TOLD,
    ) -> None:
        numbers = count(1)
        run = {Origin.BLANK: OTHER_RUN, Origin.RESTARTED: RUN, Origin.STANDBY: NO_RUN}[origin]
        self.machine = MasterMachine(
            Timing(), run, term, lambda size: bytes([next(numbers)] * size), 0,
            origin, incumbent, standbys, stands_by_for=("10.0.0.9:1",), vouched=vouched,
        )  # fmt: skip
        self.now_ns = 0

    def do(self, event: MasterEvent) -> list[MasterEffect]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def hear(self, connection: int, *messages: msg.Message) -> list[MasterEffect]:
        return [e for m in messages for e in self.do(ConnectionMessage(connection, m))]

    def open(self, connection: int, peer: int | None = None) -> None:
        self.do(ConnectionOpened(connection, f"10.0.0.{peer or connection}"))

    def register(self, peer: int, masters: int = 1) -> list[MasterEffect]:
        self.open(peer)
        return self.hear(peer, msg.Register(0, "", 4000 + peer, 1, masters))

    def say(
        self,
        peer: int,
        *more: msg.Message,
        connection: int | None = None,
        known: tuple[Roster, ...] | None = None,
        term: int = 1,
        rounds: tuple[msg.RoundCount, ...] = (),
        run: bytes = RUN,
        incumbent: bytes = MASTER,
        masters: int = 1,
        secret: bytes | None = None,
    ) -> list[MasterEffect]:
        """A peer returns with a report; its end is not said yet."""
        connection = peer if connection is None else connection
        known = (roster(VERSION, VIEW, 1, 2, 3),) if known is None else known
        newest = max((r.version for r in known), default=0)
        header = msg.Return(
            PeerId(peer), secret or token(peer), run, term,
            msg.Register(0, "", 4000 + peer, 1, masters), newest, rounds, incumbent,
        )  # fmt: skip
        self.open(connection, peer)
        return self.hear(connection, header, *(msg.KnownRoster(r) for r in known), *more)

    def come(self, peer: int, *more: msg.Message, **options: object) -> list[MasterEffect]:
        """A peer returns, and has said everything."""
        effects = self.say(peer, *more, **options)  # type: ignore[arg-type]
        connection = options.get("connection", peer)
        assert isinstance(connection, int)
        return effects + self.hear(connection, msg.Reported())

    def wait(self, seconds: float, speaking: tuple[int, ...] = ()) -> list[MasterEffect]:
        """Let time pass with punctual ticks; give all effects but signs of life."""
        effects: list[MasterEffect] = []
        end_ns = self.now_ns + round(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += SECOND // 4
            for connection in speaking:
                effects += self.hear(connection, msg.Heartbeat())
            effects += self.do(MasterTick())
        quiet = (msg.MasterHeartbeat, msg.AdmissionWaits)
        return [e for e in effects if not (isinstance(e, SendTo) and isinstance(e.message, quiet))]


def sent(effects: list[MasterEffect]) -> list[tuple[int, msg.MasterMessage]]:
    return [(e.connection, e.message) for e in effects if isinstance(e, SendTo)]


def told(effects: list[MasterEffect], kind: type) -> list[tuple[int, msg.MasterMessage]]:
    return [(connection, m) for connection, m in sent(effects) if isinstance(m, kind)]


def removals(effects: list[MasterEffect]) -> list[tuple[int, str]]:
    return [(e.peer, e.text) for e in effects if isinstance(e, Announce) and e.what == "removed"]


# -- the run as it was -----------------------------------------------------------------------


def test_a_blank_master_takes_up_a_run_as_soon_as_everybody_is_back() -> None:
    master = Master()
    assert master.come(1) == []
    assert master.come(3) == []
    assert master.machine.recovering
    known = roster(VERSION + TERM_GAP + 1, VIEW, 1, 2, 3)
    assert master.come(2) == [
        Remember(RUN, 2, NEXT),
        SendTo(1, msg.Resumed(2, NEXT)),
        SendTo(1, msg.LinkPlan(())),
        SendTo(1, msg.RosterChanged(known)),
        SendTo(2, msg.Resumed(2, NEXT)),
        SendTo(2, msg.LinkPlan((where(1),))),
        SendTo(2, msg.RosterChanged(known)),
        SendTo(3, msg.Resumed(2, NEXT)),
        SendTo(3, msg.LinkPlan((where(1), where(2)))),
        SendTo(3, msg.RosterChanged(known)),
    ]
    assert (master.machine.shown_run, master.machine.shown_term) == (RUN, 2)


def test_who_does_not_come_back_is_removed_when_the_window_ends() -> None:
    master = Master(Origin.RESTARTED, term=2)
    assert master.come(1) == []
    assert master.come(2) == []
    assert master.wait(4.75, speaking=(1, 2)) == []
    effects = master.wait(0.25, speaking=(1, 2))
    assert removals(effects) == [(3, "CONTROL_LOST: it did not come back to the restarted master")]
    successor = roster(VERSION + TERM_GAP + 2, VIEW + TERM_GAP + 1, 1, 2, term=2)
    assert sent(effects)[-2:] == [
        (1, msg.RosterChanged(successor)),
        (2, msg.RosterChanged(successor)),
    ]


def test_the_term_is_above_all_that_anybody_has_followed_and_all_that_was_kept() -> None:
    for kept, followed, term in ((2, 1, 2), (2, 6, 7), (9, 3, 9)):
        master = Master(Origin.RESTARTED, term=kept)
        known = (roster(VERSION, VIEW, 1, 2),)
        master.come(1, term=1, known=known)
        effects = master.come(2, term=followed, known=known)
        assert effects[0] == Remember(RUN, term, NEXT)


def test_nothing_that_the_master_before_may_have_given_out_is_given_out_again() -> None:
    master = Master()
    known = (roster(VERSION, VIEW, 1, 2),)
    master.come(1, known=known)
    master.come(2, known=known)
    assert sent(master.register(3))[0] == (
        3,
        msg.Registered(PeerId(2 + JUMP + 1), 2, RUN, bytes([2] * 16), NEXT),
    )
    master.hear(1, msg.Goodbye())
    newest = master.machine.membership.roster(0)
    assert (newest.version, newest.view) == (VERSION + TERM_GAP + 2, VIEW + TERM_GAP + 1)


def test_every_round_goes_on_where_it_was() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(1, msg.RoundRequest(RoundId(PENDING, 4)), known=known, rounds=counts(3, 4))
    effects = master.come(
        2, msg.RoundRequest(RoundId(PENDING, 4)), known=known, rounds=counts(3, 4)
    )
    closed = msg.RoundClosed(RoundId(PENDING, 4), VERSION + TERM_GAP + 1, False)
    assert sent(effects)[-2:] == [(1, closed), (2, closed)]


def test_operations_in_a_view_that_is_open_keep_its_term() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    request = msg.OperationRequest(operation(3), SUM)
    master.come(1, request, known=known)
    effects = master.come(2, request, known=known)
    assert sent(effects)[-2:] == [
        (1, msg.OperationStarted(operation(3))),
        (2, msg.OperationStarted(operation(3))),
    ]
    master.hear(1, msg.OperationDone(operation(3), b"x"))
    effects = master.hear(2, msg.OperationDone(operation(3), b"x"))
    committed = ended(operation(3), contributors=(1, 2), version=VERSION + TERM_GAP + 1)
    assert sent(effects) == [(1, committed), (2, committed)]
    wrong = operation(4, term=2)
    (effect,) = master.hear(1, msg.OperationRequest(wrong, SUM))
    assert isinstance(effect, CloseConnection)
    assert f"view {VIEW} is of term 1" in effect.reason


def test_two_groups() -> None:
    master = Master()
    for peer, group in ((1, 0), (2, 1)):
        known = Roster(VERSION, group, VIEW, (where(peer),), (VIEW,), 2, 2, 1)
        header = msg.Return(
            PeerId(peer), token(peer), RUN, 1, msg.Register(group, "", 4000 + peer),
            VERSION, (), MASTER,
        )  # fmt: skip
        master.open(peer)
        effects = master.hear(peer, header, msg.KnownRoster(known), msg.Reported())
    changed = told(effects, msg.RosterChanged)
    assert [(c, m.roster.group, m.roster.ring) for c, m in changed] == [  # type: ignore[union-attr]
        (1, 0, (ONE,)),
        (2, 1, (TWO,)),
    ]


def test_the_newest_roster_counts_and_older_views_in_it_stay_open() -> None:
    old = roster(VERSION, VIEW, 1, 2)
    new = roster(VERSION + 1, VIEW + 1, 1, 2, 3, views=(VIEW, VIEW + 1))
    master = Master()
    master.come(1, known=(old,))  # it has not heard of the newcomer
    master.come(2, known=(old, new))
    effects = master.come(3, known=(new,))
    assert SendTo(3, msg.Resumed(2, NEXT)) in effects
    for peer in (1, 2):
        master.hear(peer, msg.OperationRequest(operation(), SUM))
    assert master.machine.membership.newest_view(0) == VIEW + 1
    seen = [m.roster.version for c, m in told(effects, msg.RosterChanged) if c == 1]  # type: ignore[union-attr]
    assert seen == [VERSION + 1, VERSION + TERM_GAP + 2]  # what it has missed comes, too


# -- operations ------------------------------------------------------------------------------


def test_an_outcome_that_one_member_has_seen_is_the_outcome() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    done = msg.OperationDone(operation(), b"x")
    aborted = ended(operation(), AbortCause.WITHDRAWN, "peer 1 withdrew: Ctrl-C", sequence=12)
    master = Master()
    master.come(1, msg.KnownOutcome(aborted), known=known)
    effects = master.come(2, msg.OperationRequest(operation(), SUM), done, known=known)
    assert (2, aborted) in sent(effects)
    assert (1, aborted) not in sent(effects)
    assert not [m for _, m in told(effects, msg.OperationEnded) if m != aborted]
    master.hear(2, msg.Heartbeat((), (operation(),), ()))
    for peer in (1, 2):  # the next number follows
        effects = master.hear(peer, msg.OperationRequest(operation(1), SUM))
    assert sent(effects) == [(p, msg.OperationStarted(operation(1))) for p in (1, 2)]


def test_all_who_are_back_are_done_and_the_operation_commits_without_the_missing() -> None:
    master = Master(Origin.RESTARTED, term=2)
    words = (msg.OperationRequest(operation(), SUM), msg.OperationDone(operation(), b"x"))
    master.come(1, *words)
    master.come(2, *words)
    effects = master.wait(5, speaking=(1, 2))
    committed = ended(operation(), contributors=(1, 2, 3), version=VERSION + TERM_GAP + 2)
    assert told(effects, msg.OperationEnded) == [(1, committed), (2, committed)]


def test_one_who_is_back_disagrees() -> None:
    master = Master(Origin.RESTARTED, term=2)
    request = msg.OperationRequest(operation(), SUM)
    master.come(1, request, msg.OperationDone(operation(), b"x"))
    master.come(2, request, msg.OperationDone(operation(), b"y"))
    ends = told(master.wait(5, speaking=(1, 2)), msg.OperationEnded)
    mismatch = AbortCause.DIGEST_MISMATCH
    assert [(c, m.abort) for c, m in ends] == [(1, mismatch), (2, mismatch)]  # type: ignore[union-attr]


def test_one_who_is_back_is_not_done_and_is_waited_for() -> None:
    """Peer 1, right behind the missing one, has everything: nobody lacks it."""
    master = Master(Origin.RESTARTED, term=2)
    request = msg.OperationRequest(operation(), SUM)
    master.come(1, request, msg.OperationDone(operation(), b"x"))
    master.come(2, request)
    assert told(master.wait(5, speaking=(1, 2)), msg.OperationEnded) == []
    effects = master.hear(2, msg.OperationDone(operation(), b"x"))
    committed = ended(operation(), contributors=(1, 2, 3), version=VERSION + TERM_GAP + 2)
    assert sent(effects) == [(1, committed), (2, committed)]


def test_what_went_on_behind_the_missing_one_cannot_go_on_without_it() -> None:
    master = Master(Origin.RESTARTED, term=2)
    request = msg.OperationRequest(operation(), SUM)
    master.come(1, request)
    master.come(2, request, msg.OperationDone(operation(), b"x"))
    effects = master.wait(5, speaking=(1, 2))
    ((asked, query),) = told(effects, msg.HoldingsQuery)
    assert (asked, query) == (1, msg.HoldingsQuery(operation(), (THREE,)))
    effects = master.hear(1, msg.Holdings(operation(), 1, complete=False))
    lost = AbortCause.MEMBER_LOST
    ends = told(effects, msg.OperationEnded)
    assert [(c, m.abort) for c, m in ends] == [(1, lost), (2, lost)]  # type: ignore[union-attr]


def test_a_done_report_whose_start_nobody_else_has_heard_starts_it_for_all() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    request = msg.OperationRequest(operation(2), SUM)
    master = Master()
    master.come(1, request, msg.OperationDone(operation(2), b"x"), known=known)
    effects = master.come(2, request, known=known)
    assert (2, msg.OperationStarted(operation(2))) in sent(effects)
    effects = master.hear(2, msg.OperationDone(operation(2), b"x"))
    assert [c for c, _ in told(effects, msg.OperationEnded)] == [1, 2]


def test_a_request_that_one_member_has_not_made_yet_waits_for_it() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    request = msg.OperationRequest(operation(), SUM)
    master = Master()
    master.come(1, request, known=known)
    assert told(master.come(2, known=known), msg.OperationStarted) == []
    effects = master.hear(2, request)
    assert sent(effects) == [(p, msg.OperationStarted(operation())) for p in (1, 2)]


def test_a_withdrawal_that_got_lost_with_the_master_ends_it_for_all() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(1, msg.OperationRequest(operation(), SUM), known=known)
    effects = master.come(2, msg.Withdraw(operation(), "Ctrl-C"), known=known)
    ends = told(effects, msg.OperationEnded)
    assert [(c, m.abort) for c, m in ends] == [  # type: ignore[union-attr]
        (1, AbortCause.WITHDRAWN),
        (2, AbortCause.WITHDRAWN),
    ]


# -- rounds ----------------------------------------------------------------------------------


def test_an_answer_that_one_member_has_seen_is_the_answer() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    answer = msg.RoundClosed(RoundId(PENDING, 4), VERSION, True, sequence=9)
    master = Master()
    master.come(1, msg.KnownAnswer(answer), known=known, rounds=counts(3, 5))
    effects = master.come(
        2, msg.RoundRequest(RoundId(PENDING, 4)), known=known, rounds=counts(3, 4)
    )
    assert (2, answer) in told(effects, msg.RoundClosed)
    assert (1, answer) not in told(effects, msg.RoundClosed)


def test_a_round_whose_answer_nobody_can_tell_is_answered_from_the_counts() -> None:
    """Peer 1 has taken the answer and forgotten it: it was settled, or so it was told."""
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(1, known=known, rounds=counts(3, 5))
    effects = master.come(
        2, msg.RoundRequest(RoundId(PENDING, 4)), known=known, rounds=counts(3, 4)
    )
    answer = msg.RoundClosed(RoundId(PENDING, 4), VERSION + TERM_GAP + 1, False)
    assert (2, answer) in told(effects, msg.RoundClosed)


def test_a_member_that_lags_by_several_rounds_is_answered_each_of_them() -> None:
    """The last master had removed peer 2, closed rounds without it, and lacked the consent."""
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(1, known=known, rounds=counts(3, 5))
    rounds = [RoundId(PENDING, n) for n in (2, 3, 4)]
    effects = master.come(2, msg.RoundRequest(rounds[0]), known=known, rounds=counts(3, 2))
    answers = [(2, msg.RoundClosed(closed, VERSION + TERM_GAP + 1, False)) for closed in rounds]
    assert answers[0] in told(effects, msg.RoundClosed)
    assert answers[2] in told(effects, msg.RoundClosed)  # the latest, without being asked
    effects = master.hear(2, msg.RoundRequest(rounds[1]))
    assert told(effects, msg.RoundClosed) == [answers[1]]


# -- newcomers -------------------------------------------------------------------------------


def test_newcomers_wait_for_the_members_and_are_registered_then() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master(Origin.RESTARTED, term=2)
    assert master.register(3) == []
    assert master.machine.shown_run == NO_RUN
    master.come(1, known=known)
    effects = master.come(2, known=known)
    stranger = PeerId(2 + JUMP + 1)
    assert sent(effects)[-2:] == [
        (3, msg.Registered(stranger, 2, RUN, bytes([2] * 16), NEXT)),
        (3, msg.LinkPlan((where(1), where(2)))),
    ]


def test_newcomers_that_were_registered_before_keep_their_ids() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(3, known=())
    master.come(1, known=known)
    effects = master.come(2, known=known)
    assert [c for c, _ in told(effects, msg.Resumed)] == [1, 2, 3]
    assert [peer.id for peer in master.machine.membership.pending()] == [THREE]
    master.hear(3, msg.LinkReport(ONE, True, ""), msg.LinkReport(TWO, True, ""))
    master.hear(1, msg.RoundRequest(RoundId(UPDATE, 0)))
    effects = master.hear(2, msg.RoundRequest(RoundId(UPDATE, 0)))
    ((connection, admission),) = told(effects, msg.Admitted)
    assert connection == 3
    assert isinstance(admission, msg.Admitted)
    assert admission.roster.ring == (ONE, TWO, THREE)


def test_a_newcomer_may_go_while_it_waits() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.register(9)
    assert master.hear(9, msg.Goodbye()) == [CloseConnection(9, "it left")]
    master.register(8)
    master.do(ConnectionClosed(8, "reset"))
    effects = master.wait(5)
    assert told(effects, msg.Registered) == []


def test_a_young_run_gives_way_to_members_of_an_older_one() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    assert told(master.register(9), msg.Admitted) != []
    assert master.machine.shown_run == NO_RUN
    assert master.say(1, known=known) == []
    given_up = [CloseConnection(9, "members of an older run are back")]
    assert master.hear(1, msg.Reported()) == given_up
    effects = master.come(2, known=known)
    assert effects[0] == Remember(RUN, 2, NEXT)


def test_a_run_that_is_no_longer_young_is_not_given_up() -> None:
    master = Master()
    master.register(9)
    master.wait(5, speaking=(9,))
    assert master.machine.shown_run == OTHER_RUN
    reason = "this master coordinates another run"
    assert master.come(1)[:2] == [SendTo(1, msg.Refused(None, reason)), CloseConnection(1, reason)]


def test_members_of_two_runs_do_not_mix() -> None:
    master = Master()
    master.come(1)
    reason = "this master coordinates another run"
    effects = master.come(2, run=OTHER_RUN)
    assert effects[:2] == [SendTo(2, msg.Refused(None, reason)), CloseConnection(2, reason)]


# -- who belongs to it -----------------------------------------------------------------------


def test_a_member_that_was_removed_before_is_told_so() -> None:
    """It has not heard of its removal: the newest roster is without it."""
    master = Master()
    newest = roster(VERSION + 1, VIEW + 1, 1, 2)
    master.come(3)
    master.come(1, known=(roster(VERSION, VIEW, 1, 2, 3), newest))
    effects = master.come(2, known=(newest,))
    why = "the run went on without it"
    assert sent(effects)[-1] == (3, msg.Refused(RemovalCause.CONTROL_LOST, why))
    assert effects[-1] == CloseConnection(3, why)


def test_who_comes_too_late_is_told_so() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.come(1)
    master.come(2)
    master.wait(5, speaking=(1, 2))
    effects = master.come(3)
    why = "it did not come back to the restarted master"
    assert effects == [
        SendTo(3, msg.Refused(RemovalCause.CONTROL_LOST, why, 5000, 5000)),
        CloseConnection(3, why),
    ]


@pytest.mark.parametrize("peer", [3, 2], ids=["a newcomer", "a member"])
def test_a_late_return_is_charged_until_all_is_said(peer: int) -> None:
    master = Master()
    known = (roster(VERSION, VIEW, 1, 2),)
    master.come(1, known=known)
    assert master.machine.trust_in(1) is Trust.MEMBER, "it returned in time"
    master.say(2, known=known)
    assert master.machine.trust_in(2) is Trust.RETURNING
    master.hear(2, msg.Reported())
    late, term = 10 + peer, master.machine.term
    if peer == 2:
        master.say(2, known=known, connection=late, term=term, incumbent=NEXT)
    else:
        master.say(3, known=(), connection=late)
    assert master.machine.trust_in(late) is Trust.LATE
    assert master.hear(late, *(msg.KnownRoster(r) for r in known * 1000)) == []
    master.hear(late, msg.Reported())
    assert master.machine.trust_in(late) is (Trust.MEMBER if peer == 2 else Trust.NEWCOMER)


def test_a_pending_newcomer_that_returns_late_is_still_one() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(1, known=known)
    master.come(2, known=known)
    effects = master.come(3, known=())
    assert sent(effects) == [
        (3, msg.Resumed(2, NEXT)),
        (3, msg.LinkPlan((where(1), where(2)))),
    ]
    assert [peer.id for peer in master.machine.membership.pending()] == [THREE]


def test_a_peer_that_lost_its_connection_meanwhile_goes_on() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master(Origin.RESTARTED, term=2)
    master.come(1, known=known)
    assert master.do(ConnectionClosed(1, "reset")) == []
    master.come(2, known=known)
    effects = master.come(1, connection=11, known=known)
    assert sent(effects)[:2] == [(11, msg.Resumed(2, NEXT)), (11, msg.LinkPlan(()))]
    assert removals(master.wait(30, speaking=(11, 2))) == []


def test_half_a_report_is_none() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master(Origin.RESTARTED, term=2)
    master.say(1, known=known)
    master.do(ConnectionClosed(1, "reset"))
    assert master.come(2, known=known) == []
    effects = master.wait(5, speaking=(2,))
    assert [peer for peer, _ in removals(effects)] == [1]


def test_the_second_connection_of_a_peer_takes_the_place_of_the_first() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.say(1, known=known)
    assert master.come(1, connection=11, known=known) == [CloseConnection(1, "superseded")]
    assert master.hear(1, msg.Reported()) == []
    assert master.do(ConnectionClosed(1, "reset")) == []
    effects = master.come(2, known=known)
    assert [c for c, _ in told(effects, msg.Resumed)] == [11, 2]


def test_nobody_returns_in_the_name_of_another() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.come(1, known=known)
    effects = master.say(1, connection=11, known=known, secret=b"guessed")
    assert effects == [CloseConnection(11, "another process has returned as peer 1")]
    effects = master.come(2, known=known)
    assert [c for c, _ in told(effects, msg.Resumed)] == [1, 2]
    effects = master.come(1, connection=12, known=known, secret=b"guessed")
    assert told(effects, msg.Resumed) == []


@pytest.mark.parametrize(
    "words",
    [
        (msg.KnownRoster(roster(VERSION, VIEW, 2, 3)),),
        (msg.KnownRoster(Roster(VERSION, 1, VIEW, (where(1),), (VIEW,), 1, 1, 1)),),
        (msg.Register(0, "", 1), msg.Reported()),
        (msg.Return(ONE, token(1), RUN, 1, msg.Register(0, "", 1), 0, (), MASTER),),
        (msg.MasterHeartbeat(), msg.Reported()),
        (msg.OperationRequest(operation(view=VIEW + 9), SUM), msg.Reported()),
        (msg.RoundRequest(RoundId(PENDING, 77)), msg.Reported()),
    ],
    ids=["without it", "of others", "registers", "twice", "a master's", "future", "not open"],
)
def test_garbage_in_a_report_costs_that_connection_only(words: tuple[msg.Message, ...]) -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master(Origin.RESTARTED, term=2)
    master.come(2, known=known)
    effects = master.say(1, *words, known=known) + master.wait(5, speaking=(2,))
    assert [e.connection for e in effects if isinstance(e, CloseConnection)] == [1]
    assert (2, msg.Resumed(2, NEXT)) in sent(effects)
    effects += master.wait(2, speaking=(2,))
    assert [peer for peer, _ in removals(effects)] == [1]
    assert 2 in master.machine.connections.peers


def test_a_report_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.recovery.REPORT_BYTES_MAX", 20 << 10)
    master = Master()
    assert master.say(1, *[msg.Heartbeat()] * 10) == []
    assert master.hear(1, *[msg.Heartbeat()] * 10) == [
        CloseConnection(1, "its report is too large")
    ]


@pytest.mark.parametrize("run", [b"short", NO_RUN])
def test_who_returns_from_no_run(run: bytes) -> None:
    master = Master()
    assert master.say(1, run=run, known=()) == [CloseConnection(1, "it returns from no run")]


@pytest.mark.parametrize("message", [msg.Heartbeat(), msg.Reported(), msg.Goodbye()])
def test_a_stranger_must_introduce_itself(message: msg.Message) -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.open(9)
    assert master.hear(9, message) == [
        CloseConnection(9, "did not begin with Register, Resume or Return")
    ]


def test_who_only_resumes_is_not_known() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.open(1)
    reason = "this master does not know you"
    assert master.hear(1, msg.Resume(ONE, token(1), VERSION)) == [
        SendTo(1, msg.Refused(None, reason)),
        CloseConnection(1, reason),
    ]


# -- leaving meanwhile -----------------------------------------------------------------------


def test_who_says_goodbye_meanwhile_is_not_waited_for() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.come(1)
    master.come(3)
    assert master.hear(3, msg.Goodbye()) == [CloseConnection(3, "it left")]
    effects = master.come(2)
    assert removals(effects) == [(3, "GOODBYE: it left")]
    assert master.machine.membership.roster(0).ring == (ONE, TWO)


def test_the_last_goodbye_ends_the_wait() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.come(1)
    master.come(2)
    master.say(3)
    master.hear(3, msg.Goodbye())
    effects = master.wait(0.25, speaking=(1, 2))
    assert removals(effects) == [(3, "GOODBYE: it left")]


def test_a_run_that_nobody_returns_to_begins_empty_in_the_next_term() -> None:
    master = Master(Origin.RESTARTED, term=5)
    assert master.register(1) == []
    assert master.wait(4.75) == []
    effects = master.wait(0.25)
    assert effects[0] == Remember(RUN, 5, NEXT)
    registered, _, admitted = sent(effects)
    assert registered == (
        1,
        msg.Registered(PeerId(JUMP + 1), 5, RUN, bytes([2] * 16), NEXT),
    )
    assert isinstance(admitted[1], msg.Admitted)
    assert admitted[1].roster.term == 5


# -- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sleep_s", [1, 30, 3600])
def test_a_late_tick_gives_everybody_so_much_more_time(sleep_s: int) -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.come(1)
    assert master.wait(4.5, speaking=(1,)) == []
    master.now_ns += sleep_s * SECOND
    assert removals(master.do(MasterTick())) == []
    assert removals(master.wait(0.25, speaking=(1,))) == []
    assert [peer for peer, _ in removals(master.wait(0.25, speaking=(1,)))] == [2, 3]


def test_a_blank_master_counts_from_the_first_who_returns() -> None:
    master = Master()
    assert master.wait(60) == []
    master.come(1)
    assert master.wait(4.75, speaking=(1,)) == []
    assert [peer for peer, _ in removals(master.wait(0.25, speaking=(1,)))] == [2, 3]


def test_signs_of_life_go_to_all_who_wait() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.come(1)
    master.register(9)
    master.open(8)  # it has said nothing
    beats: list[int] = []
    for _ in range(4):
        master.now_ns += SECOND // 4
        beats += [connection for connection, _ in sent(master.do(MasterTick()))]
    assert sorted(beats) == [1, 9]


# -- what reviews have found -----------------------------------------------------------------


def test_who_follows_a_later_master_is_no_consent_here() -> None:
    master = Master(Origin.RESTARTED, term=2)
    master.come(1)
    master.come(2)
    master.wait(5, speaking=(1, 2))
    assert master.machine.term == 2
    effects = master.say(2, connection=12, term=3, incumbent=b"a later")
    assert CloseConnection(12, "it follows a later master") in effects
    assert master.machine.membership.peers[PeerId(2)].connection == 2


def test_a_newcomer_of_a_master_that_jumped_further_keeps_its_id() -> None:
    """Two restarts follow each other, and only the newcomer has met the first one."""
    master = Master(Origin.RESTARTED, term=2)
    for peer in (1, 2, 3):
        master.come(peer)
    newcomer = 3 + TERM_GAP + 0xFFFFFF + 1
    assert newcomer > 3 + JUMP
    effects = master.come(newcomer, connection=14, known=())
    assert (14, msg.Resumed(2, NEXT)) in sent(effects)
    (registered,) = told(master.register(15), msg.Registered)
    assert registered[1].peer == newcomer + 1  # type: ignore[union-attr]


def test_a_member_whose_admission_nobody_else_knows_is_told_that_the_run_went_on() -> None:
    master = Master(Origin.RESTARTED, term=2)
    for peer in (1, 2, 3):
        master.come(peer)
    stranger = 3 + JUMP + 1
    effects = master.say(stranger, connection=14, known=(roster(9, 9, stranger),))
    reason = "the run went on without it"
    assert (14, msg.Refused(RemovalCause.CONTROL_LOST, reason, 0)) in sent(effects)
    assert CloseConnection(14, reason) in effects
    assert PeerId(stranger) not in master.machine.membership.peers
    (registered,) = told(master.register(15), msg.Registered)
    assert registered[1].peer == stranger  # type: ignore[union-attr]


def test_an_id_that_no_master_gives_out_binds_nobody() -> None:
    master = Master(Origin.RESTARTED, term=2)
    for peer in (1, 2, 3):
        master.come(peer)
    effects = master.say((1 << 62) - 1, connection=14, known=())
    assert CloseConnection(14, "the run went on without it") in effects
    (registered,) = told(master.register(15), msg.Registered)
    assert registered[1].peer == 3 + JUMP + 1  # type: ignore[union-attr]


def learns(
    master: Master, run: bytes = RUN, *members: int, settled: bool = True
) -> list[MasterEffect]:
    """The master that a standby stands by for has said which run it has, and who is in it."""
    proofs = tuple(proof(peer, token(peer)) for peer in members)
    who = (VERSION, proofs) if members else (0, None)
    return master.do(MasterAnswered(0, msg.RunIs(run, 1, settled, *who)))


def proof(peer: int, secret: bytes) -> msg.MemberProof:
    return msg.MemberProof(PeerId(peer), hashlib.blake2b(secret, digest_size=16).digest())


def vouched_for(*members: int) -> Vouched:
    return Vouched.of(VERSION, [proof(peer, token(peer)) for peer in members])


INVENTED = (roster(1 << 40, 99, 99),)
"""What an intruder says that it was told: it alone is the run, by now."""


def test_a_standby_believes_those_whom_its_master_has_named() -> None:
    """Anybody with the token can ask for the run's id, and return to it."""
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3)
    assert told(master.come(99, known=INVENTED), msg.Resumed) == []
    effects = master.wait(4) + master.do(MasterAnswered(0, msg.RunIs(RUN, 1, True)))
    effects += master.wait(8)
    assert told(effects, msg.Resumed) == []
    assert [e.connection for e in effects if isinstance(e, CloseConnection)] == [99]
    master.come(99, known=INVENTED)
    for peer in (1, 2, 3):
        master.come(peer)
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]


def test_nobody_returns_as_a_peer_whose_token_he_does_not_know() -> None:
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3)
    effects = master.say(1, connection=99, known=INVENTED[:0], secret=b"guessed")
    assert effects == [CloseConnection(99, "its token is not that of peer 1")]
    assert told(master.come(1), msg.Refused) == []


def test_a_goodbye_of_somebody_else_makes_no_majority_smaller() -> None:
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3, 4, 5)
    whole = (roster(VERSION, VIEW, 1, 2, 3, 4, 5),)
    for peer in (6, 7, 8):
        master.come(peer, known=INVENTED[:0])
        master.hear(peer, msg.Goodbye())
    for peer in (1, 2):
        master.come(peer, known=whole)
    assert told(master.wait(6, speaking=(1, 2)), msg.Resumed) == []


def test_a_member_that_its_master_has_not_named_yet_is_one_by_the_word_of_the_others() -> None:
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2)
    whole = (roster(VERSION, VIEW, 1, 2), roster(VERSION + 1, VIEW + 1, 1, 2, 3))
    for peer in (1, 2, 3):
        master.come(peer, known=whole if peer < 3 else whole[1:])
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]


def test_whom_a_master_named_long_ago_may_all_be_gone() -> None:
    """It was cut off from its standby, and not from the members."""
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3)
    master.wait(Timing().master_lost_s / 2)
    known = (roster(VERSION + 9, VIEW + 9, 7, 8),)
    for peer in (7, 8):
        master.come(peer, known=known)
    for peer in (7, 8):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [7, 8]


def test_a_master_that_is_started_again_knows_its_members() -> None:
    """An intruder had only to be there when it came back: the newest roster was his."""
    master = Master(Origin.RESTARTED, term=2, vouched=vouched_for(1, 2, 3))
    master.come(99, known=INVENTED, masters=5)
    effects = [effect for peer in (1, 2, 3) for effect in master.come(peer)]
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]
    reason = "the run went on without it"
    assert (99, msg.Refused(RemovalCause.CONTROL_LOST, reason, 0)) in sent(effects)


def test_whoever_comes_again_and_again_does_not_make_a_master_wait() -> None:
    """The time to return begins with the first that returns, and with the first that counts."""
    master = Master(Origin.RESTARTED, term=2, vouched=vouched_for(1, 2, 3))
    connection = 99
    while master.machine.recovering:
        master.come(99, connection=connection, known=INVENTED)
        master.wait(1)
        connection += 1
    assert connection - 99 <= 6
    assert master.machine.membership.members() == []


def test_a_stranger_that_was_believed_for_want_of_others_leaves_no_number() -> None:
    """Its roster was the newest, until the master could be heard again."""
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3)
    master.wait(Timing().master_lost_s / 2)
    huge = (1 << 62) - 1
    master.come(99, known=(roster(huge, 99, 99),))
    master.do(MasterAnswered(0, msg.RunIs(RUN, 1, True)))
    for peer in (1, 2, 3):
        master.come(peer)
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]
    assert master.machine.membership.version < 1 << 40


def test_who_came_as_a_peer_before_that_was_named_gives_way() -> None:
    """Ids follow each other, so a process with the token knows the next one."""
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2)
    master.come(3, connection=99, known=INVENTED[:0], secret=b"guessed")
    proofs = tuple(proof(peer, token(peer)) for peer in (1, 2, 3))
    effects = master.do(MasterAnswered(0, msg.RunIs(RUN, 1, True, VERSION + 1, proofs)))
    assert [e.connection for e in effects if isinstance(e, CloseConnection)] == [99]
    for peer in (1, 2, 3):
        master.come(peer)
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    tokens = [peer.token for peer in master.machine.membership.members()]
    assert tokens == [token(peer) for peer in (1, 2, 3)]


def test_a_goodbye_of_a_member_that_was_not_named_yet_counts() -> None:
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1)
    both = (roster(VERSION, VIEW, 1, 2),)
    master.come(2, known=both)
    master.hear(2, msg.Goodbye())
    assert told(master.come(1, known=both), msg.Resumed) != []


def test_who_was_not_named_has_no_vote() -> None:
    """He may be somebody else: with his vote a standby went on beside a master that lived."""
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1)
    known = (roster(VERSION, VIEW, 1), roster(VERSION + 1, VIEW + 1, 1, 2, 3))
    master.come(1, known=known)
    for peer in (2, 3):
        master.come(peer, known=known[1:], secret=b"guessed")
    assert told(master.wait(4, speaking=(1, 2, 3)), msg.Resumed) == []
    proofs = tuple(proof(peer, token(peer)) for peer in (1, 2, 3))
    master.do(MasterAnswered(0, msg.RunIs(RUN, 1, True, VERSION + 1, proofs)))
    for peer in (1, 2, 3):
        master.come(peer, known=known[1:], connection=10 + peer)
    for peer in (11, 12, 13):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]


def test_who_was_named_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others have returned, and whatever they have said."""
    monkeypatch.setattr("pccl.machines.master.succession.recovery.PEERS_MAX", 5)
    monkeypatch.setattr("pccl.machines.master.succession.recovered.PEERS_MAX", 5)
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3)
    for stranger in range(90, 95):
        master.come(stranger, known=INVENTED[:0])
    full = [CloseConnection(95, "too many have returned")]
    assert master.say(95, known=INVENTED[:0]) == full
    closed = [effect for peer in (1, 2, 3) for effect in master.come(peer)]
    assert [e.connection for e in closed if isinstance(e, CloseConnection)] == [90, 91, 92]
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]


def test_newcomers_that_wait_for_a_recovery_are_bounded_and_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.restart.PENDING_MAX", 3)
    master = Master(Origin.RESTARTED, term=2)
    for number in (10, 11, 12):
        master.do(ConnectionOpened(number, "10.0.0.9"))
        assert master.hear(number, msg.Register(0, "", 4000)) == []
    master.do(ConnectionOpened(20, "10.0.0.20"))
    effects = master.hear(20, msg.Register(0, "", 4000))
    assert [connection for connection, _ in sent(effects)] == [10]


def test_a_master_that_has_moved_on_keeps_nothing_from_a_run_of_before() -> None:
    """Whom it named of one run, it has not named of another."""
    master = Master(Origin.STANDBY)
    learns(master, RUN, 1, 2, 3)
    learns(master, OTHER_RUN)
    remembered = Remember(OTHER_RUN, 1, NEXT, coordinated=False)
    assert remembered.vouched == NOT_TOLD
    assert told(master.come(7, run=RUN), msg.Resumed) == []


def test_a_standby_takes_up_no_run_that_its_master_has_not_named() -> None:
    """Nobody who knows the token can invent one for it, or bring one that is long over."""
    master = Master(Origin.STANDBY)
    (unknown,) = master.come(7, run=OTHER_RUN, known=(roster(VERSION, VIEW, 7),))
    assert isinstance(unknown, CloseConnection)
    assert unknown.reason.startswith("it is a standby, and takes up no run before")
    assert master.wait(12) == [AskMaster(0, msg.RunQuery())]
    assert learns(master) == [Remember(RUN, 1, NEXT, coordinated=False)]
    another = "this master coordinates another run"
    refused = [SendTo(7, msg.Refused(None, another)), CloseConnection(7, another)]
    assert master.come(7, run=OTHER_RUN, known=(roster(VERSION, VIEW, 7),)) == refused
    for peer in (1, 2, 3):
        assert told(master.come(peer), msg.Refused) == []
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    assert (master.machine.run, master.machine.term) == (RUN, 2)


def test_a_standby_asks_until_it_coordinates_the_run() -> None:
    master = Master(Origin.STANDBY)
    assert master.wait(1) == [AskMaster(0, msg.RunQuery())]
    learns(master, RUN, 1, 2, 3)
    assert master.wait(1) == [AskMaster(0, msg.RunQuery(RUN, VERSION))]
    for peer in (1, 2, 3):
        master.come(peer)
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    learns(master, OTHER_RUN)
    assert [e for e in master.wait(4, speaking=(1, 2, 3)) if isinstance(e, AskMaster)] == []
    assert master.machine.run == RUN


def test_a_standby_that_reaches_no_master_says_so_once() -> None:
    master = Master(Origin.STANDBY)
    master.wait(0.25)
    (warning,) = master.do(MasterUnanswered(0, "connection refused"))
    assert isinstance(warning, Warn)
    assert warning.text.endswith("which one that is: 10.0.0.9:1: connection refused")
    assert master.do(MasterUnanswered(0, "connection refused")) == []


def test_a_master_names_its_run_and_whether_it_may_yet_give_it_up() -> None:
    def named(master: Master) -> msg.MasterMessage:
        master.open(9)
        ((_, answer),) = sent(master.hear(9, msg.RunQuery()))
        master.do(ConnectionClosed(9, "it knows"))
        return answer

    blank = Master()
    assert named(blank) == msg.RunIs(OTHER_RUN, 1, False, 0, ())
    blank.register(1)
    blank.wait(5, speaking=(1,))
    (registered,) = (p.token for p in blank.machine.membership.peers.values())
    assert named(blank) == msg.RunIs(OTHER_RUN, 1, True, 1, (proof(1, registered),))
    blank.open(9)
    known = sent(blank.hear(9, msg.RunQuery(OTHER_RUN, 1)))
    assert known == [(9, msg.RunIs(OTHER_RUN, 1, True))]
    assert named(Master(Origin.RESTARTED, term=4)) == msg.RunIs(RUN, 4, True)
    idle = Master(Origin.STANDBY)
    learns(idle)
    assert named(idle) == msg.RunIs(NO_RUN, 0, False)  # it has heard of it only
    gives_way = Master()
    gives_way.come(1)
    assert named(gives_way) == msg.RunIs(NO_RUN, 0, False)  # members say so, and no master


def test_an_older_run_that_too_few_come_from_does_not_end_a_young_one() -> None:
    """A stale process, or a stranger who knows the token, can't take away what two have begun."""
    alone = (roster(VERSION, VIEW, 1),)
    master = Master()
    master.register(8)
    master.register(9)
    assert master.come(1, known=alone) == []
    assert not master.machine.recovering
    effects = master.wait(5, speaking=(8, 9))
    another = "this master coordinates another run"
    assert (1, msg.Refused(None, another)) in sent(effects)
    assert master.machine.shown_run == OTHER_RUN
    assert {8, 9} == set(master.machine.connections.peers)


def test_as_many_of_an_older_run_end_a_young_one() -> None:
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master()
    master.register(8)
    master.register(9)
    assert master.come(1, known=known) == []
    effects = master.come(2, known=known)
    assert [e.connection for e in effects if isinstance(e, CloseConnection)] == [8, 9]
    assert Remember(RUN, 2, NEXT) in effects


# -- what nobody may claim -------------------------------------------------------------------


@pytest.mark.parametrize("host", ["x" * 254, "x" * 4000, "a\nb"])
def test_a_return_passes_the_checks_of_a_registration(host: str) -> None:
    header = msg.Return(ONE, token(1), RUN, 1, msg.Register(0, host, 1), 0, (), MASTER)
    for origin in (Origin.BLANK, Origin.RESTARTED):
        master = Master(origin, term=2)
        master.open(1)
        reason = "this is no host name, or it is too long"
        assert master.hear(1, header) == [CloseConnection(1, reason)]


def test_a_master_that_has_given_out_all_ids_itself_knows_no_others() -> None:
    master = Master()
    master.register(1)
    master.wait(5, speaking=(1,))
    effects = master.come(4, run=OTHER_RUN, known=())
    assert CloseConnection(4, "the run went on without it") in effects
    assert list(master.machine.membership.peers) == [ONE]


def test_groups_that_share_members_and_views_of_strangers_are_not_taken_up() -> None:
    def in_group(group: int, version: int, view: int, *peers: int) -> Roster:
        members = tuple(where(peer) for peer in peers)
        return Roster(version, group, view, members, (view,), 3, 2, 3)

    master = Master(Origin.RESTARTED, term=2)
    stale = roster(VERSION - 1, VIEW - 1, 1, 2, 3, 66)
    later = roster(VERSION, VIEW, 1, 2, 3, views=(VIEW - 1, VIEW))
    master.say(4, connection=4, known=())
    master.do(ConnectionClosed(4, "reset"))
    for peer in (1, 2, 3):
        master.come(peer, known=(stale, later))
    assert master.machine.membership.view(0, VIEW - 1) is None
    master = Master(Origin.RESTARTED, term=2)
    liar = msg.Return(THREE, token(3), RUN, 1, msg.Register(5, "", 4003), 7, (), MASTER)
    master.open(3)
    known = msg.KnownRoster(in_group(5, VERSION - 2, 2, 3, 1))
    master.hear(3, liar, known, msg.Reported())
    for peer in (1, 2):
        master.come(peer)
    master.wait(5, speaking=(1, 2, 3))
    assert [peer.group for peer in master.machine.membership.members()] == [0, 0]


def test_ids_that_no_master_gives_out_do_not_drive_later_ones_up() -> None:
    master = Master(Origin.RESTARTED, term=2)
    invented = (1 << 62) - 1
    master.come(invented, connection=14, known=())
    effects = [e for peer in (1, 2, 3) for e in master.come(peer)]
    reason = "the run went on without it"
    assert (14, msg.Refused(RemovalCause.CONTROL_LOST, reason)) in sent(effects)
    (registered,) = told(master.register(15), msg.Registered)
    assert registered[1].peer == 3 + JUMP + 1  # type: ignore[union-attr]


def test_reports_that_are_not_complete_are_closed_when_the_run_goes_on() -> None:
    """Nobody would ever hear of that connection again, and it would stay."""
    known = (roster(VERSION, VIEW, 1, 2),)
    master = Master(Origin.RESTARTED, term=2)
    master.say(9, known=())
    master.come(1, known=known)
    effects = master.come(2, known=known)
    assert CloseConnection(9, "the run went on before its report was complete") in effects
    assert set(master.machine.connections.hosts) == {1, 2}


def test_the_largest_report_has_to_go_if_there_is_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.recovery.REPORTS_BYTES_MAX", 40 << 10)
    known = (roster(VERSION, VIEW, 1, 2, 3),)
    master = Master(Origin.RESTARTED, term=2)
    master.come(1, known=known)
    effects = master.say(3, *[msg.Heartbeat()] * 25, known=known)
    assert effects == []
    reason = "its report is the largest, and there is no room for all"
    assert CloseConnection(3, reason) in master.say(2, *[msg.Heartbeat()] * 10, known=known)
    master.hear(2, msg.Reported())
    assert set(master.machine.connections.hosts) == {1, 2}


def test_what_a_crowd_reports_alike_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand members of a full run have all been told the same rosters."""
    monkeypatch.setattr("pccl.machines.master.succession.recovery.REPORTS_BYTES_MAX", 700 << 10)
    crowd = tuple(range(1, 101))
    rosters = tuple(roster(VERSION + n, VIEW + n, *crowd) for n in range(20))
    master = Master(Origin.RESTARTED, term=2)
    for peer in crowd:  # a roster takes about 17 KiB, all that they tell 34 MiB
        assert told(master.come(peer, known=rosters), msg.Refused) == []
    assert len(master.machine.membership.members()) == 100


def test_a_roster_is_told_once_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.recovery.ROSTERS_KEPT_MAX", 2)
    many = tuple(roster(VERSION + n, VIEW + n, 1) for n in range(3))
    for known in ((many[0], many[0]), many):
        master = Master(Origin.RESTARTED, term=2)
        assert master.say(1, known=known) == [
            CloseConnection(1, "more rosters than a master keeps")
        ]


def test_a_run_that_all_have_left_is_not_remembered() -> None:
    master = Master(Origin.RESTARTED, term=2)
    for peer in (1, 2, 3):
        master.come(peer)
    effects = [e for peer in (1, 2, 3) for e in master.hear(peer, msg.Goodbye())]
    assert [e for e in effects if isinstance(e, ForgetRun)] == [ForgetRun()]
    assert effects[-1] == ForgetRun()
    effects = master.register(4)
    assert Remember(RUN, 2, NEXT) in effects  # it has a member again


def test_the_status_of_a_master_that_coordinates_nothing() -> None:
    for origin, words in (
        (
            Origin.STANDBY,
            "it is a standby, and takes up no run before a master that it stands by for has said "
            "which one that is: 10.0.0.9:1",
        ),
        (Origin.RESTARTED, f"0 of ? members of run {RUN.hex()} have returned to it"),
    ):
        master = Master(origin, term=2)
        master.open(9)
        ((_, report),) = sent(master.hear(9, msg.StatusRequest()))
        assert isinstance(report, StatusReport)
        assert (report.waits_for, report.members) == (words, ())


def test_two_restarts_in_a_row_give_out_different_ids() -> None:
    """The newcomer of the first one has not come back when the second one begins."""
    given: list[int] = []
    for chance in (b"\x07", b"\x09"):
        master = Master(Origin.RESTARTED, term=2)
        master.machine.registration.random_bytes = lambda size, chance=chance: chance * size  # type: ignore[misc]
        for peer in (1, 2, 3):
            master.come(peer)
        ((_, registered),) = told(master.register(9), msg.Registered)
        assert isinstance(registered, msg.Registered)
        given.append(registered.peer)
    jumps = [int.from_bytes(chance * 3) for chance in (b"\x07", b"\x09")]
    assert given == [3 + TERM_GAP + jump + 1 for jump in jumps]


def test_another_process_under_a_members_id_is_no_member() -> None:
    """It was registered under that id by a master whose newcomers nobody could tell of."""
    members = roster(VERSION, VIEW, 1, 2, 9)
    master = Master(Origin.RESTARTED, term=2)
    for peer in (1, 2):
        master.come(peer, known=(members,))
    header = msg.Return(
        PeerId(9), token(9), RUN, 1, msg.Register(0, "", 5000), 0, counts(), MASTER
    )  # its port is 5000, the member's is 4009
    master.open(9)
    master.hear(9, header, msg.Reported())
    effects = master.wait(5, speaking=(1, 2))
    assert [peer for peer, _ in removals(effects)] == [9]
    ((_, refused),) = [(c, m) for c, m in told(effects, msg.Refused) if c == 9]
    assert isinstance(refused, msg.Refused)
    assert refused.cause is RemovalCause.CONTROL_LOST


@pytest.mark.parametrize("says", [msg.StatusRequest(), msg.Resume(ONE, token(1), 0)])
def test_who_waits_and_says_something_else_waits_no_more(says: msg.Message) -> None:
    """Its connection is closed, so it must not count among those that wait."""
    master = Master(Origin.RESTARTED)
    for connection in range(1, PENDING_MAX + 2):
        master.do(ConnectionOpened(connection, "10.0.0.1"))
        assert master.hear(connection, msg.Register(0, "", 5000)) == []  # there is room
        if connection == 1:
            closed = master.hear(connection, says)
            assert [type(effect) for effect in closed] == [CloseConnection]
