"""What a program hears of its own peer, and what people may ask it."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pccl
from pccl.cli.why import why
from pccl.errors import NotAdmitted, PCCLError, PeerSilent, RemoteProtocolError
from pccl.inquiry import EvidenceKind, master_status, peer_evidence
from pccl.observe import events as tell
from tests.integration.conftest import Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"


class Heard:
    """The events that a consumer has taken, and the threads in which it was called."""

    def __init__(self) -> None:
        self.events: list[tell.PeerReport] = []
        self.threads: set[str] = set()

    def __call__(self, event: tell.PeerReport) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def ask(run: Run, peer: pccl.Communicator, kind: EvidenceKind, token: str | None = None) -> Any:
    return peer_evidence(peer.peer_id, kind, run.master.address, token=token)


# -- events -------------------------------------------------------------------------------------


def test_a_consumer_ends_with_its_communicator(new_run: Callable[..., Run]) -> None:
    (member,) = new_run(1).members
    heard = Heard()
    before = threading.active_count()
    member.on_event(heard)
    member.close()
    (left,) = heard.of(tell.MembershipLost)
    assert left.cause == "CLOSED"
    assert threading.active_count() <= before


def test_a_program_hears_who_comes_and_goes_by_name(new_run: Callable[..., Run]) -> None:
    run, heard = new_run(), Heard()
    alice = run.newcomer(name="alice")
    alice.on_event(heard)
    alice.connect()
    run.members.append(alice)
    bob = run.join(name="bob")
    run.reduce([np.ones(4), np.ones(4)])
    assert [member.name for member in alice.members()] == ["alice", "bob"]
    assert {one.name for one in master_status(run.master.address).members} == {"alice", "bob"}
    gone = bob.peer_id
    bob.close()
    until(lambda: heard.of(tell.MemberLost))
    alice.close()
    until(lambda: heard.of(tell.MembershipLost))
    (joined,) = heard.of(tell.Joined)
    assert (joined.name, joined.world_size, joined.rejoined) == ("alice", 1, False)
    (came,) = heard.of(tell.MemberJoined)
    assert (came.peer_id, came.name, came.host, came.world_size) == (gone, "bob", "127.0.0.1", 2)
    assert heard.of(tell.MemberLost) == [
        tell.MemberLost(peer_id=gone, name="bob", cause="GOODBYE", reason="it left", world_size=1)
    ]
    (ended,) = [one for one in heard.of(tell.CallEnded) if one.call == "all_reduce"]
    assert (ended.outcome, ended.reason, ended.attempts) == ("ok", "", 1)
    assert heard.threads == {"pccl-events"}


def test_a_consumer_that_raises_is_dropped_with_one_line(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "pccl.events")
    run, heard, calls = new_run(), Heard(), list[tell.PeerReport]()

    def fail(event: tell.PeerReport) -> None:
        calls.append(event)
        raise ZeroDivisionError("a bug")

    comm = run.newcomer()
    comm.on_event(fail)
    comm.on_event(heard)
    comm.connect()
    comm.update_topology()
    until(lambda: len(heard.events) >= 3 and caplog.messages)
    assert len(calls) == 1
    (line,) = caplog.messages
    assert line.endswith("is not called again; training continues. ZeroDivisionError: a bug")


def test_a_consumer_that_was_ended_hears_no_more(new_run: Callable[..., Run]) -> None:
    run, first, second = new_run(), Heard(), Heard()
    comm = run.newcomer()
    stop = comm.on_event(first)
    comm.on_event(second)
    comm.connect()
    until(lambda: first.of(tell.Joined))
    stop()
    stop()
    before = list(first.events)
    comm.update_topology()
    until(lambda: len(second.events) > len(before))
    assert first.events == before


def test_a_consumer_may_end_itself_and_ask_its_peer(new_run: Callable[..., Run]) -> None:
    run = new_run()
    comm = run.newcomer()
    standing: list[str] = []
    gone = threading.Event()

    def once(event: tell.PeerReport) -> None:
        if isinstance(event, tell.CallEnded):
            standing.append(comm.status().standing)
            stop()
            gone.set()

    stop = comm.on_event(once)
    comm.connect()
    until(gone.is_set)
    comm.update_topology()
    assert standing == ["member"]


def test_what_is_no_consumer(new_run: Callable[..., Run]) -> None:
    comm = new_run().newcomer()
    wrong: Any = "print"
    with pytest.raises(TypeError, match=r"^consumer must be"):
        comm.on_event(wrong)


def test_reported_steps_are_in_the_status(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (comm,) = run.members
    comm.report_step(2**62)
    until(lambda: master_status(run.master.address).members[0].step == 2**62)
    with pytest.raises(ValueError, match="step must be from 0 to"):
        comm.report_step(2**62 + 1)
    with pytest.raises(ValueError, match="step must be from 0 to"):
        comm.report_step(-1)
    wrong: Any = 1.5
    with pytest.raises(TypeError, match="step must be"):
        comm.report_step(wrong)


def test_reported_losses_are_in_the_status(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (comm,) = run.members

    def told(loss: float | None) -> bool:
        return master_status(run.master.address).members[0].loss == loss

    numpys: Any = np.float32(2.5)
    comm.report_step(1, loss=numpys)
    comm.report_step(2)  # as DiLoCo does: the loss stays
    until(lambda: told(2.5))
    comm.report_step(3, loss=math.nan)
    until(lambda: told(None))
    comm.report_step(4, loss=-1)
    until(lambda: told(-1.0))
    wrong: Any = "2.5"
    with pytest.raises(
        TypeError, match=r"loss must be a number or None \(loss.item\(\) of a tensor\)"
    ):
        comm.report_step(5, loss=wrong)


def test_reported_figures_are_in_the_status(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (comm,) = run.members

    def told(*figures: tuple[str, float]) -> bool:
        found = master_status(run.master.address).members[0].figures
        return [(one.name, one.value) for one in found] == [*figures]

    numpys: Any = np.float32(2)
    comm.report_step(1, figures={"cosine": 0.5, "noise scale": math.nan, "step": numpys})
    comm.report_step(2)
    until(lambda: told(("cosine", 0.5), ("step", 2.0)))
    comm.report_step(3, figures={})
    until(told)
    wrong: Any = [("cosine", 1.0)]
    with pytest.raises(TypeError, match="figures must map names to numbers"):
        comm.report_step(4, figures=wrong)
    with pytest.raises(ValueError, match="figures has 9 numbers; report at most 8"):
        comm.report_step(4, figures=dict.fromkeys("abcdefghi", 1.0))
    with pytest.raises(ValueError, match="of a figure has more than 64 bytes; shorten it"):
        comm.report_step(4, figures={"é" * 33: 1.0})
    wrong = {"cosine": "1"}
    with pytest.raises(TypeError, match="the figure 'cosine' must be a number"):
        comm.report_step(4, figures=wrong)


@pytest.mark.parametrize("name", ["", "a\nb", "n" * 65])
def test_a_wrong_name_is_an_error_of_the_caller(new_run: Callable[..., Run], name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: a name must"):
        new_run().newcomer(name=name)


# -- evidence -----------------------------------------------------------------------------------


def test_the_state_of_a_peer_that_waits(new_run: Callable[..., Run]) -> None:
    run = new_run(2, name="bob")
    first, second = run.members
    first.report_step(7)
    waiting = run.start(first.all_reduce, np.ones(1000), tag=3)
    run.until(lambda: run.requests == 1)
    state = ask(run, first, EvidenceKind.STATE)
    assert (state["name"], state["pid"], state["step"]) == ("bob", os.getpid(), 7)
    assert (state["peer_id"], state["standing"]) == (first.peer_id, "member")
    assert [(one["call"], one["tag"]) for one in state["calls"]] == [("all_reduce", 3)]
    assert [one["peer_id"] for one in state["links"]] == [second.peer_id]
    assert {one["peer_id"] for one in state["paths"]} <= {second.peer_id}
    assert ask(run, second, EvidenceKind.STATE)["calls"] == []
    second.all_reduce(np.ones(1000), tag=3)
    waiting.result(LIMIT_S)


def test_a_run_without_a_token_gives_no_stacks(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    with pytest.raises(NotAdmitted, match="this peer gives no stacks: the run has no token"):
        ask(run, run.members[0], EvidenceKind.STACKS)


def test_stacks_show_where_threads_are(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(1, token=TOKEN)
    (comm,) = run.members
    inside, goes_on = threading.Event(), threading.Event()

    def be_stuck_here() -> None:
        inside.set()
        goes_on.wait(LIMIT_S)

    stuck = threading.Thread(target=be_stuck_here, name="stuck")
    stuck.start()
    try:
        assert inside.wait(LIMIT_S)
        found = {one["thread"]: one["frames"] for one in ask_all(run, comm)}
    finally:
        goes_on.set()
        stuck.join(LIMIT_S)
    *_, inner = found["stuck"]  # innermost last
    assert " in wait: " in inner
    assert any(" in be_stuck_here: goes_on.wait(" in frame for frame in found["stuck"])
    assert "MainThread" in found
    with pytest.raises(RemoteProtocolError):
        ask(run, comm, EvidenceKind.STACKS, "xK4m-Vw2p_Rt9s-Lq7n")
    monkeypatch.setenv("PCCL_STACKS", "0")
    with pytest.raises(NotAdmitted, match="this peer gives no stacks: PCCL_STACKS=0"):
        ask_all(run, comm)


def ask_all(run: Run, comm: pccl.Communicator) -> Any:
    return ask(run, comm, EvidenceKind.STACKS, TOKEN)


def test_an_unknown_peer_has_no_evidence(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    with pytest.raises(NotAdmitted, match="peer 77 is not a member of the run"):
        peer_evidence(77, EvidenceKind.STATE, run.master.address)


Source = Callable[[EvidenceKind], Awaitable[tuple[bytes, str]]]


async def _hang(kind: EvidenceKind) -> tuple[bytes, str]:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


async def _fail(kind: EvidenceKind) -> tuple[bytes, str]:
    raise LookupError("a bug")


async def _damage(kind: EvidenceKind) -> tuple[bytes, str]:
    return b"no evidence", ""


@pytest.mark.usefixtures("quick_silence")
@pytest.mark.parametrize(
    ("source", "error", "reason"),
    [
        (_hang, PeerSilent, "peer 2 did not answer within 1 s"),
        (_fail, NotAdmitted, "gathering evidence failed: LookupError: a bug"),
        (None, NotAdmitted, "this peer gives no evidence"),
        (_damage, RemoteProtocolError, "the evidence of the peer is not valid: Error -3"),
    ],
)
def test_only_a_peer_that_does_not_answer_is_silent(
    new_run: Callable[..., Run], source: Source | None, error: type[PCCLError], reason: str
) -> None:
    run = new_run(2)
    second = run.members[1]
    engine_of(second).evidence = source
    with pytest.raises(PCCLError, match=reason) as caught:
        ask(run, second, EvidenceKind.STATE)
    assert type(caught.value) is error
    done = CliRunner().invoke(why, [run.master.address])
    named = "does not answer" in done.stdout
    assert named == (error is PeerSilent)
    assert done.exit_code == (3 if named else 0)
    members = run.master.status().members
    assert [one.peer for one in members] == [1, 2]
    assert (f"no evidence from peer 2 ({members[1].name}): {reason}" in done.stdout) != named


def test_a_peer_without_stacks_makes_no_file_for_its_parent(
    new_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_STACKS_DIR", str(tmp_path))
    monkeypatch.setenv("PCCL_STACKS", "0")
    new_run(1)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_call_keeps_no_tensor(new_run: Callable[..., Run]) -> None:
    (alone,) = new_run(1).members

    class Tensor(np.ndarray[Any, Any]):
        """Can be referred to weakly."""

    gc.collect()
    gc.disable()
    try:
        tensor = np.ones(4).view(Tensor)
        kept = weakref.ref(tensor)
        with pytest.raises(pccl.errors.TooFewPeers):
            alone.all_reduce(tensor)
        del tensor
        until(lambda: kept() is None)
    finally:
        gc.enable()
