"""Members that wait for different things: who is stuck, when they are told, and in what words."""

from __future__ import annotations

from pccl.machines.master.events import ConnectionClosed, MasterEffect, MasterTick
from pccl.machines.master.lockstep import (
    AskBlocked,
    Finding,
    LockstepWatch,
    LongWait,
    Stuck,
    Wait,
    stuck_members,
)
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.types import AbortCause, OperationId, PeerId, RoundId, RoundKind
from tests.support.master_stage import SECOND, MasterStage, sent
from tests.support.scenarios import op

STEP = SECOND // 4
A, B, C, D = (PeerId(n) for n in (1, 2, 3, 4))
UPDATE = RoundId(RoundKind.UPDATE_TOPOLOGY, 4)
PENDING = RoundId(RoundKind.PEERS_PENDING, 2)


def operation(tag: int, group: int = 0) -> OperationId:
    return op(tag=tag, group=group)


def wait(
    subject: RoundId | OperationId, requested: tuple[PeerId, ...], missing: tuple[PeerId, ...]
) -> Wait:
    return Wait(subject, what(subject), requested, missing)


def what(subject: RoundId | OperationId) -> str:
    if isinstance(subject, OperationId):
        return f"tag {subject.tag}"
    return "update_topology" if subject == UPDATE else "are_peers_pending"


# -- who is stuck --------------------------------------------------------------------------------


def test_two_members_that_wait_for_each_other_are_stuck() -> None:
    waits = [wait(UPDATE, (A,), (B,)), wait(operation(5), (B,), (A,))]
    assert stuck_members([A, B], waits) == (A, B)


def test_who_is_not_blocked_may_still_call() -> None:
    waits = [wait(UPDATE, (A,), (B,)), wait(operation(5), (B,), (A,))]
    assert stuck_members([A], waits) == ()
    assert stuck_members([B], waits) == ()


def test_members_that_wait_for_somebody_free_are_not_stuck() -> None:
    assert stuck_members([A, B], [wait(UPDATE, (A, B), (C,))]) == ()


def test_who_waits_for_the_stuck_is_stuck_as_well() -> None:
    waits = [
        wait(operation(5), (A,), (B,)),
        wait(operation(6), (B,), (A,)),
        wait(operation(7, group=1), (C,), (D,)),
        wait(UPDATE, (D,), (A, B, C)),
    ]
    assert stuck_members([A, B, C, D], waits) == (A, B, C, D)


def test_one_thread_that_gets_on_may_release_the_others() -> None:
    waits = [
        wait(UPDATE, (A,), (B, C)),
        wait(operation(5), (B,), (A,)),
        wait(operation(6), (B,), (C,)),  # another thread of B, and C is free
    ]
    assert stuck_members([A, B], waits) == ()


def test_a_started_operation_releases_its_members() -> None:
    waits = [wait(operation(6), (A, B), ()), wait(UPDATE, (A,), (B,)), wait(PENDING, (B,), (A,))]
    assert stuck_members([A, B], waits) == ()


def test_a_blocked_member_of_which_nothing_was_heard_is_not_stuck() -> None:
    assert stuck_members([A, B], [wait(UPDATE, (A,), (B,))]) == ()
    assert stuck_members([], []) == ()


# -- the watch -----------------------------------------------------------------------------------


CIRCLE = (wait(UPDATE, (A,), (B,)), wait(operation(5), (B,), (A,)))
CIRCLE_IN_WORDS = (
    "the members wait in different calls: peer 1 in update_topology, peer 2 in {}; "
    "make the same calls in the same order on all members"
)


class Watch:
    """A watch and its clock."""

    def __init__(self) -> None:
        self.watch = LockstepWatch(Timing(waiting_report_s=5.0))
        self.now_ns = 0

    def look(self, waits: tuple[Wait, ...], *blocked: PeerId) -> list[Finding]:
        """Look once, a quarter of a second after the last time."""
        self.now_ns += STEP
        return self.watch.look(waits, blocked, self.now_ns)

    def answer(self, *peers: PeerId) -> None:
        """To the first question: they are blocked."""
        for peer in peers:
            self.watch.answered(peer, 1, 0, blocked=True)

    def ask(self, waits: tuple[Wait, ...] = CIRCLE, query: int = 1) -> None:
        """Get a circle to the point where its members were asked."""
        for _ in range(4):
            assert self.look(waits, A, B) == []
        assert self.look(waits, A, B) == [AskBlocked(query, (A, B))]


def test_they_are_asked_after_a_second_and_told_when_all_have_answered() -> None:
    watch = Watch()
    watch.ask()
    assert watch.look(CIRCLE, A, B) == []
    watch.answer(A)
    assert watch.look(CIRCLE, A, B) == []
    watch.answer(B)
    reason = CIRCLE_IN_WORDS.format("tag 5")
    assert watch.look(CIRCLE, A, B) == [Stuck((operation(5),), reason)]
    # if the same is found again, everything is done anew
    watch.ask(query=2)


def test_any_change_starts_anew() -> None:
    widened = (wait(UPDATE, (A, C), (B,)), CIRCLE[1])
    watch = Watch()
    for _ in range(4):
        assert watch.look(CIRCLE, A, B) == []
    assert watch.look(CIRCLE, A) == []  # B may call
    watch.ask()
    watch.answer(A, B)
    for _ in range(4):
        assert watch.look(widened, A, B) == []
    assert watch.look(widened, A, B) == [AskBlocked(2, (A, B))]
    for peer in (A, B):
        watch.watch.answered(peer, 1, 0, blocked=True)  # of the last case
    assert watch.look(widened, A, B) == []
    assert watch.look((), A, B) == []


def test_a_change_elsewhere_changes_nothing() -> None:
    watch = Watch()
    others = [wait(operation(9, group=1), (C,), (D,)), wait(operation(8, group=1), (C, D), ())]
    for turn in range(4):
        assert watch.look((*CIRCLE, others[turn % 2]), A, B, C) == []
    assert watch.look(CIRCLE, A, B) == [AskBlocked(1, (A, B))]


def test_a_member_that_was_released_starts_anew_also_if_it_is_blocked_again() -> None:
    watch = Watch()
    watch.ask()
    watch.answer(A)
    watch.watch.answered(B, 1, watch.now_ns, blocked=False)
    for _ in range(7):  # two seconds
        assert watch.look(CIRCLE, A, B) == []
    watch.ask(query=2)


def test_a_member_that_is_free_does_not_save_the_others() -> None:
    """It has an open handle, perhaps, but makes none of the calls that the others wait for."""
    watch, waits = Watch(), (*CIRCLE, wait(operation(6), (C,), (A, B)))
    for _ in range(4):
        assert watch.look(waits, A, B, C) == []
    assert watch.look(waits, A, B, C) == [AskBlocked(1, (A, B, C))]
    watch.answer(A)
    watch.watch.answered(C, 1, watch.now_ns, blocked=False)
    assert watch.look(waits, A, B, C) == []
    watch.answer(B)
    (told,) = watch.look(waits, A, B, C)
    assert told == Stuck((operation(5),), CIRCLE_IN_WORDS.format("tag 5"))


def test_a_member_is_free_until_it_makes_another_call() -> None:
    watch = Watch()
    watch.ask()
    watch.watch.answered(B, 1, watch.now_ns, blocked=False)
    assert watch.look(CIRCLE, A, B) == []
    moved = (CIRCLE[0], wait(operation(7), (B,), (A,)))
    for _ in range(4):
        assert watch.look(moved, A, B) == []
    assert watch.look(moved, A, B) == [AskBlocked(2, (A, B))]


def test_who_does_not_answer_is_asked_again() -> None:
    watch = Watch()
    watch.ask()
    watch.answer(A)
    for _ in range(3):
        assert watch.look(CIRCLE, A, B) == []
    assert watch.look(CIRCLE, A, B) == [AskBlocked(1, (B,))]
    watch.answer(B)
    assert isinstance(watch.look(CIRCLE, A, B)[0], Stuck)


def test_answers_that_nobody_asked_for() -> None:
    watch = Watch()
    watch.watch.answered(A, 0, 0, blocked=True)
    for _ in range(4):
        assert watch.look(CIRCLE, A, B) == []
        for peer, query in ((A, 0), (B, 1), (C, 7)):
            watch.watch.answered(peer, query, 0, blocked=True)
    assert watch.look(CIRCLE, A, B) == [AskBlocked(1, (A, B))]
    watch.watch.answered(C, 1, 0, blocked=True)
    watch.watch.answered(C, 1, 0, blocked=False)  # a stranger disturbs nothing
    watch.watch.answered(A, 2, 0, blocked=False)  # nor does an answer to another question
    watch.answer(A, B)
    assert isinstance(watch.look(CIRCLE, A, B)[0], Stuck)


def test_rounds_end_if_there_is_nothing_narrower() -> None:
    watch = Watch()
    waits = (wait(UPDATE, (A,), (B, C)), wait(PENDING, (B,), (A, C)))
    watch.ask(waits)
    watch.answer(A, B)
    reason = CIRCLE_IN_WORDS.format("are_peers_pending")
    assert watch.look(waits, A, B) == [Stuck((UPDATE, PENDING), reason)]


def test_all_collectives_of_the_stuck_end_and_no_others() -> None:
    waits = (
        wait(operation(5), (A,), (B,)),
        wait(UPDATE, (A,), (B, C)),
        wait(operation(6), (B,), (A,)),
        wait(operation(7, group=1), (C,), (D,)),
    )
    watch = Watch()
    watch.ask(waits)
    watch.answer(A, B)
    (finding,) = watch.look(waits, A, B)
    assert isinstance(finding, Stuck)
    assert finding.subjects == (operation(5), operation(6))
    assert "peer 1 in tag 5 and update_topology, peer 2 in tag 6" in finding.reason


# -- long waits ----------------------------------------------------------------------------------


def test_long_waits_are_told_with_doubling_pauses() -> None:
    watch = Watch()
    waits = (wait(UPDATE, (A,), (B, C)), wait(operation(5), (C,), (B,)))
    told: dict[float, list[Finding]] = {}
    for _ in range(45 * 4):
        findings = watch.look(waits)
        if findings:
            told[watch.now_ns / SECOND - 0.25] = findings
    assert told == {
        waited_s: [
            LongWait(waits[0], waited_s, ("no call", "tag 5")),
            LongWait(waits[1], waited_s, ("no call",)),
        ]
        for waited_s in (5, 10, 20, 40)
    }


def test_a_wait_is_as_old_as_its_subject() -> None:
    watch = Watch()
    for _ in range(10):
        assert watch.look((wait(UPDATE, (A,), (B, C)),)) == []
    for _ in range(10):
        assert watch.look((wait(UPDATE, (A, B), (C,)),)) == []
    (finding,) = watch.look((wait(UPDATE, (A, B), (C,)),))
    assert finding == LongWait(wait(UPDATE, (A, B), (C,)), 5, ("no call",))


def test_a_new_round_has_not_waited_yet() -> None:
    watch = Watch()
    later = RoundId(RoundKind.UPDATE_TOPOLOGY, 5)
    for _ in range(19):
        assert watch.look((wait(UPDATE, (A,), (B,)),)) == []
    for _ in range(20):
        assert watch.look((wait(later, (A,), (B,)),)) == []
    assert len(watch.look((wait(later, (A,), (B,)),))) == 1


def test_what_goes_on_without_a_call_is_no_wait() -> None:
    watch = Watch()
    assert [watch.look((wait(operation(5), (A, B), ()),)) for _ in range(100)] == [[]] * 100


# -- a master that looks -------------------------------------------------------------------------


Sent = list[tuple[int, msg.MasterMessage]]
UPDATES, PENDINGS, _ = RoundKind
ROUNDS = {kind: RoundId(kind, 0) for kind in RoundKind}


class Members:
    """Members of these groups, that keep saying whether they are blocked; peer n, connection n."""

    def __init__(self, *groups: int) -> None:
        self.stage = MasterStage().begin().together(*groups)
        self.blocked = dict.fromkeys(range(1, len(groups) + 1), False)

    def hear(self, peer: int, *messages: msg.Message) -> Sent:
        return sent(self.stage.hear(peer, *messages))

    def ask_round(self, kind: RoundKind, *peers: int) -> None:
        self.stage.round(kind, 0, *peers)
        self.blocked |= dict.fromkeys(peers, True)

    def ask_reduce(self, tag: int, *peers: int, group: int = 0) -> Sent:
        self.blocked |= dict.fromkeys(peers, True)
        return sent(self.stage.start(*peers, what=operation(tag, group)))

    def wait(self, seconds: float) -> Sent:
        """Let time pass; give what was sent meanwhile, but for signs of life."""
        effects: list[MasterEffect] = []
        for _ in range(int(seconds * 4)):
            self.stage.sleep(0.25)
            for peer, blocked in self.blocked.items():
                effects += self.stage.hear(peer, msg.Heartbeat(blocked=blocked))
            effects += self.stage.do(MasterTick())
        return [one for one in sent(effects) if not isinstance(one[1], msg.MasterHeartbeat)]

    def reply(self, *peers: int, query: int = 1, blocked: bool = True) -> None:
        for peer in peers:
            self.hear(peer, msg.BlockedReply(query, blocked))


def in_a_circle(*groups: int) -> Members:
    """Peer 1 waits in a round, peer 2 in a collective, and both were asked."""
    master = Members(*groups or (0, 0))
    master.ask_round(UPDATES, 1)
    master.ask_reduce(5, 2)
    assert master.wait(1) == []
    assert master.wait(0.25) == [(1, msg.BlockedQuery(1)), (2, msg.BlockedQuery(1))]
    return master


def test_a_collective_ends_and_the_round_waits_on() -> None:
    master = in_a_circle()
    master.reply(1, 2)
    reason = CIRCLE_IN_WORDS.format("tag 5 (SUM of 8 x float32)")
    aborted = msg.OperationEnded(operation(5), AbortCause.LOCKSTEP, reason, (), 1)
    assert master.wait(0.25) == [(1, aborted), (2, aborted)]
    closed = msg.RoundClosed(ROUNDS[UPDATES], 1, False)
    assert master.hear(2, msg.RoundRequest(ROUNDS[UPDATES])) == [(1, closed), (2, closed)]


def test_rounds_end_for_all_members_and_count() -> None:
    master = Members(0, 0, 0)
    master.ask_round(UPDATES, 1)
    master.ask_round(PENDINGS, 2)
    asked = master.wait(1.25)
    assert asked == [(1, msg.BlockedQuery(1)), (2, msg.BlockedQuery(1))]
    master.reply(1, 2)
    reason = CIRCLE_IN_WORDS.format("are_peers_pending")
    assert master.wait(0.25) == [
        (peer, msg.RoundClosed(ROUNDS[kind], 1, False, reason))
        for kind in (UPDATES, PENDINGS)
        for peer in (1, 2, 3)
    ]
    closed = msg.RoundClosed(RoundId(UPDATES, 1), 1, False)
    # The next one is the next one for everybody.
    assert sent(master.stage.round(UPDATES, 1, 1, 2, 3)) == [(peer, closed) for peer in (1, 2, 3)]


def test_a_verdict_is_repeated_until_it_is_acknowledged() -> None:
    master = Members(0, 0)
    master.ask_round(UPDATES, 1)
    master.ask_round(PENDINGS, 2)
    master.wait(1.25)
    master.reply(1, 2)
    verdicts = [message for peer, message in master.wait(0.25) if peer == 2]
    assert len(verdicts) == 2
    master.stage.do(ConnectionClosed(2, "reset"))
    resumed = sent(master.stage.resume(2, 12, 1))
    assert [message for _, message in resumed[2:]] == verdicts


def test_nobody_is_blamed_who_replies_that_it_is_free() -> None:
    master = in_a_circle()
    master.reply(1)
    master.reply(2, blocked=False)
    master.blocked[2] = False
    assert master.wait(4) == [
        (1, msg.RoundWaits(ROUNDS[UPDATES], 5,
                           "peer 2 at 10.0.0.2 (in tag 5 (SUM of 8 x float32))")),
        (2, msg.OperationWaits(operation(5), 5, "peer 1 at 10.0.0.1 (in update_topology)")),
    ]  # fmt: skip


def test_a_reply_that_is_lost_with_its_connection_is_asked_for_again() -> None:
    master = in_a_circle()
    master.reply(1)
    master.stage.do(ConnectionClosed(2, "reset"))
    master.stage.resume(2, 12, 1)
    del master.blocked[2]
    master.ask_reduce(5, 12)
    assert master.wait(1) == [(12, msg.BlockedQuery(1))]
    master.reply(12)
    assert {type(message) for _, message in master.wait(0.25)} == {msg.OperationEnded}


def test_a_call_that_comes_after_the_reply_is_noticed() -> None:
    master = in_a_circle()
    master.reply(1, 2)
    started = msg.OperationStarted(operation(5))
    # Another thread of it, which was not blocked after all.
    assert master.ask_reduce(5, 1) == [(1, started), (2, started)]
    assert master.wait(0.25) == []


def test_a_started_operation_keeps_everybody_from_being_blamed() -> None:
    master = Members(0, 0)
    master.ask_reduce(9, 1, 2)
    master.ask_round(UPDATES, 1)
    master.ask_round(PENDINGS, 2)
    assert not any(isinstance(message, msg.BlockedQuery) for _, message in master.wait(4))


def test_another_group_is_not_disturbed() -> None:
    """Peers 3 and 4 do what they should; that 3 waits for the stuck ones makes it one of them."""
    master = Members(0, 0, 1, 1)
    master.ask_round(UPDATES, 1, 3)
    master.ask_reduce(5, 2)
    master.ask_reduce(7, 4, group=1)
    master.blocked[4] = False  # another thread of it computes
    assert [connection for connection, _ in master.wait(1.25)] == [1, 2, 3]
    master.reply(1, 2, 3)
    ended = master.wait(0.25)
    assert [connection for connection, _ in ended] == [1, 2]
    assert all(isinstance(message, msg.OperationEnded) for _, message in ended)


def test_whoever_waits_in_a_round_for_the_stuck_goes_on_waiting() -> None:
    master = Members(0, 0, 1, 1)
    master.ask_round(UPDATES, 1, 3, 4)
    master.ask_reduce(5, 2)
    assert [connection for connection, _ in master.wait(1.25)] == [1, 2, 3, 4]
    master.reply(1, 2, 3, 4)
    assert [connection for connection, _ in master.wait(0.25)] == [1, 2]
    closed = msg.RoundClosed(ROUNDS[UPDATES], 1, False)
    released = master.hear(2, msg.RoundRequest(ROUNDS[UPDATES]))
    assert released == [(peer, closed) for peer in (1, 2, 3, 4)]


def test_a_whole_run_that_waits_in_one_circle() -> None:
    """Group 0 waits in a round, group 1 in a collective of which one member is in that round."""
    master = Members(0, 1, 1)
    master.ask_round(UPDATES, 1, 2)
    master.ask_reduce(5, 3, group=1)
    assert [connection for connection, _ in master.wait(1.25)] == [1, 2, 3]
    master.reply(1, 2, 3)
    ended = master.wait(0.25)
    assert [connection for connection, _ in ended] == [2, 3]


def test_a_member_that_is_lost_is_not_blamed() -> None:
    master = in_a_circle(0, 0, 0)
    master.reply(1)
    master.hear(2, msg.Goodbye())
    del master.blocked[2]
    assert master.wait(3) == [(3, msg.LinkPlan((), (PeerId(2),)))]


def test_hostile_replies() -> None:
    master = Members(0, 0)
    for query in (0, 1, (1 << 32) - 1):
        master.reply(1, 2, query=query)
    master.ask_round(UPDATES, 1)
    master.ask_reduce(5, 2)
    assert master.wait(1.25) == [(1, msg.BlockedQuery(1)), (2, msg.BlockedQuery(1))]
    master.reply(1, 1, 1)
    assert master.wait(0.5) == []
