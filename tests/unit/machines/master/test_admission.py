"""Who may join with a token, and what happens to members that a person expels."""

from __future__ import annotations

from pccl.machines.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    MasterEffect,
    TokensChanged,
)
from pccl.machines.master.tokens import OPEN, Tokens
from pccl.protocol import messages as msg
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.types import PeerId, RemovalCause
from tests.support.master_stage import MASTER, NEW_RUN, RUN, MasterStage, told
from tests.support.scenarios import key

SECRET = b"s" * 32
TOKENS = OPEN.make(SECRET, 0).make(SECRET, 0, is_ticket=True)
"""1: reusable, 2: a ticket."""
TWO = PeerId(2)


def knock(master: MasterStage, connection: int, token: int, who: int) -> list[MasterEffect]:
    """A process with the key of ``who`` connects with a token, and registers."""
    master.do(ConnectionOpened(connection, "10.0.0.9", key(who), token))
    return master.hear(connection, msg.Register(0, "", 4009, 1, 1))


def refusals(effects: list[MasterEffect]) -> list[str]:
    return [refused.reason for _, refused in told(effects, msg.Refused)]


def change(master: MasterStage, tokens: Tokens) -> list[MasterEffect]:
    return master.do(TokensChanged(tokens))


def run_with(tokens: Tokens) -> MasterStage:
    master = MasterStage().new(3)
    change(master, tokens)
    return master


def test_a_ticket_lets_one_process_in() -> None:
    master = run_with(TOKENS)
    master.do(ConnectionOpened(8, "10.0.0.9", key(8), 2))
    master.do(ConnectionOpened(9, "10.0.0.9", key(9), 2))
    asked = msg.Register(0, "", 4009, 1, 1)
    assert refusals(master.hear(8, asked)) == []
    (why,) = refusals(master.hear(9, asked))
    assert why == "its ticket is spent: another process has joined with it"


def test_a_question_spends_no_ticket() -> None:
    master = run_with(TOKENS)
    master.do(ConnectionOpened(8, "10.0.0.9", key(8), 2))
    master.hear(8, msg.StatusRequest())
    assert refusals(knock(master, 9, 2, 9)) == []


def test_a_ticket_cannot_be_kept_by_pretending_to_return() -> None:
    master = MasterStage().restarted()
    change(master, TOKENS)
    header = msg.Return(PeerId(50), RUN, 1, msg.Register(0, "", 4009, 1, 1), 0, (), MASTER)
    for connection, refused in ((8, 0), (9, 1)):
        master.do(ConnectionOpened(connection, "10.0.0.9", key(connection), 2))
        assert len(refusals(master.hear(connection, header))) == refused


def test_a_revoked_token_is_good_for_members_only() -> None:
    master = run_with(TOKENS.make(SECRET, 1).revoke(1))
    (why,) = refusals(knock(master, 9, 1, 9))
    assert why.startswith("its token was revoked")
    for question in (msg.StatusRequest(), msg.RunQuery(RUN, 0), msg.AddressQuery()):
        master.do(ConnectionOpened(9, "10.0.0.9", key(9), 1))
        assert refusals(master.hear(9, question)) == [why]
    master.do(ConnectionOpened(20, "10.0.0.2", key(2), 1))
    incumbent = master.machine.incumbent
    assert not refusals(master.hear(20, msg.Resume(TWO, 1, incumbent)))


def test_a_standby_may_ask_with_a_revoked_token() -> None:
    """It has proven the run's key; its copy of the tokens may be old."""
    master = run_with(TOKENS.make(SECRET, 1).revoke(1))
    own = master.machine.incarnation.signer.key
    master.do(ConnectionOpened(9, "10.0.0.9", own, 1))
    assert not refusals(master.hear(9, msg.RunQuery(RUN, 0)))


def test_a_revoked_token_is_good_for_the_members_that_return() -> None:
    """A restarted master may know nothing but what the file says: who has joined with it."""
    before = run_with(TOKENS.make(SECRET, 1).revoke(1))
    for peer in (1, 2):
        before.machine.membership.peers[PeerId(peer)].token = 1
    before.wait(6, 1, 2, 3)
    stored = before.machine.admission.needed()
    (first, *_) = stored.known
    assert set(first.owners) == {fingerprint_of(key(peer)) for peer in (1, 2)}
    master = MasterStage().restarted()
    change(master, stored)
    assert master.machine.admission.needed() == stored, "nobody has returned yet"
    header = msg.Return(TWO, RUN, 1, msg.Register(0, "", 4002, 1, 1), 7, (), MASTER)
    reason = "its token was revoked; ask the operator of the master for a new one"
    for peer, refused in ((2, []), (9, [reason])):
        master.do(ConnectionOpened(peer, f"10.0.0.{peer}", key(peer), 1))
        assert refusals(master.hear(peer, header)) == refused


def test_who_is_expelled_is_removed_and_stays_out() -> None:
    master = run_with(TOKENS)
    effects = change(master, TOKENS.expel(fingerprint_of(key(2))))
    ((where, refused),) = told(effects, msg.Refused)
    assert (where, refused.cause) == (2, RemovalCause.EXPELLED)
    assert [one.departures[0].cause for _, one in told(effects, msg.RosterChanged)] == [
        RemovalCause.EXPELLED
    ] * 2
    assert [peer.id for peer in master.machine.membership.members()] == [1, 3]
    (why,) = refusals(knock(master, 9, 1, 2))
    assert why == "this process was expelled from the run, and may not come back"
    assert not refusals(knock(master, 10, 1, 9))


def test_who_was_expelled_while_the_master_was_gone() -> None:
    master = MasterStage().restarted()
    master.come(1)
    master.come(2)
    change(master, OPEN.expel(fingerprint_of(key(2))))
    effects = master.come(3)
    assert [peer.id for peer in master.machine.membership.members()] == [1, 3]
    assert [cause.cause for _, cause in told(effects, msg.Refused)] == [RemovalCause.EXPELLED]


def test_who_returns_after_it_was_expelled() -> None:
    master = MasterStage().restarted()
    change(master, TOKENS.expel(fingerprint_of(key(2))))
    (why,) = refusals(master.say(2))
    assert why == "this process was expelled from the run, and may not come back"


def test_what_nobody_needs_is_forgotten() -> None:
    """A ticket stays: its process may have lost its connections only."""
    tokens = TOKENS.make(SECRET, 1).revoke(1)
    master = run_with(tokens)
    master.wait(6, 1, 2, 3)
    knock(master, 8, 2, 8)
    assert [token.number for token in master.machine.admission.needed().known] == [2, 3]
    master.hear(8, msg.Goodbye())
    master.do(ConnectionClosed(8, "it left"))
    assert [token.number for token in master.machine.admission.needed().known] == [2, 3]
    assert refusals(knock(master, 10, 2, 8)) == []
    (why,) = refusals(knock(master, 9, 2, 9))
    assert why == "its ticket is spent: another process has joined with it"
    change(master, master.machine.admission.tokens.revoke(2))
    master.hear(10, msg.Goodbye())
    assert [token.number for token in master.machine.admission.needed().known] == [3]


def test_a_key_has_one_peer() -> None:
    """A process that shares its key brings in no further peer."""
    master = run_with(TOKENS)
    assert refusals(knock(master, 8, 2, 8)) == []
    assert refusals(knock(master, 9, 2, 8)) == ["its process registered anew"], "its first peer"
    peers = master.machine.membership.peers.values()
    assert [(peer.connection, peer.member.key) for peer in peers if peer.id > 3] == [(9, key(8))]
    change(master, TOKENS.make(SECRET, 1).revoke(1))
    header = msg.Return(PeerId(50), NEW_RUN, 1, msg.Register(0, "", 4009, 1, 1), 0, (), MASTER)
    master.do(ConnectionOpened(20, "10.0.0.9", key(2), 1))
    (why,) = refusals(master.hear(20, header))
    assert why.startswith("its token was revoked")
    assert [peer.id for peer in peers] == [1, 2, 3, 5]


def test_a_standby_forgets_nothing() -> None:
    master = MasterStage().standby()
    tokens = TOKENS.make(SECRET, 1).revoke(1)
    change(master, tokens)
    assert master.machine.admission.needed() is tokens
