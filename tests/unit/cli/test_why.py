"""``pccl why`` beside its conclusions: what it asks, what it says of answers that do not come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pccl
from pccl.cli import why
from pccl.errors import LinkError, NotAdmitted, PCCLError, PeerSilent, RemoteProtocolError
from pccl.inquiry import EvidenceKind, LinkPath, MasterStatus
from pccl.protocol.types import PeerId
from tests.support.statuses import SAMPLE, member

CALM = replace(
    SAMPLE,
    member_count=2,
    members=(member(1, "alice"), member(2, "bob")),
    rounds=(),
    operation_count=0,
    operations=(),
    links=(),
)
WAITS = replace(CALM, member_count=3, members=SAMPLE.members[:3])
NOTHING: dict[EvidenceKind, Any] = {EvidenceKind.STATE: {}, EvidenceKind.STACKS: []}


class Run:
    """A run whose status and evidence the test sets; it notes who is asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = CALM
        self.answers: dict[tuple[int, EvidenceKind], Any] = {}
        self.asked: list[tuple[int, EvidenceKind]] = []
        monkeypatch.setattr(pccl, "master_status", self._status)
        monkeypatch.setattr(why, "peer_evidence", self._evidence)

    def _status(self, *_: object, **__: object) -> MasterStatus:
        return self.status

    def _evidence(self, peer: int, kind: EvidenceKind, *_: object, **__: object) -> Any:
        self.asked.append((peer, kind))
        answer = self.answers.get((peer, kind), NOTHING.get(kind))
        if isinstance(answer, PCCLError):
            raise answer
        return answer

    def why(self, *options: str) -> Result:
        return CliRunner().invoke(why.why, ["127.0.0.1:1", *options])


@pytest.fixture(name="run")
def make_run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (NotAdmitted(reason="64 questions are open; ask again later"), "64 questions are open; "),
        (NotAdmitted(reason="peer 2 is no longer a member of the run"), "peer 2 (bob) is no long"),
        (NotAdmitted(reason="this peer gives no evidence"), "this peer gives no evidence"),
        (LinkError(reason="the master is connected, but sent no evidence in time"), "the master "),
        (RemoteProtocolError(reason="the evidence of the peer is not valid"), "the evidence of "),
        ([], "its answer is no object of JSON"),
    ],
    ids=["busy", "removed", "forbidden", "too slow", "damaged", "no object"],
)
def test_only_silence_is_silence(run: Run, answer: Any, reason: str) -> None:
    run.answers[2, EvidenceKind.STATE] = answer
    done = run.why()
    assert done.exit_code == 0
    headline, calm, absent = done.stdout.splitlines()
    assert headline.endswith("2 members")
    assert calm == "no call waits for a member"
    assert absent.startswith(f"no evidence from peer 2 (bob): {reason}")
    assert (2, EvidenceKind.PROCESS) not in run.asked


def test_a_silent_member_is_named_and_its_process_inspected(run: Run) -> None:
    run.answers[2, EvidenceKind.STATE] = PeerSilent(reason="peer 2 did not answer within 3 s")
    run.answers[2, EvidenceKind.PROCESS] = {"process": {"pid": 77, "state": "T"}}
    done = run.why()
    assert done.exit_code == 3
    assert done.stdout.splitlines()[1:] == [
        "no call waits for a member, but the next one may:",
        "1. the process is stopped: peer 2 (bob): its process 77 is stopped (SIGSTOP, or Ctrl-Z)",
        "   to do: kill -CONT 77",
    ]


def test_a_silent_member_whose_process_nobody_knows(run: Run) -> None:
    run.answers[2, EvidenceKind.STATE] = PeerSilent(reason="peer 2 did not answer within 3 s")
    run.answers[2, EvidenceKind.PROCESS] = LinkError(reason="too slow")
    done = run.why("--json")
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert (found["waits"], found["no_evidence"]) == ([], [])
    assert [one["cause"] for one in found["blame"]] == ["UNKNOWN"]


def test_the_process_of_a_member_without_a_connection_is_inspected(run: Run) -> None:
    run.status = replace(CALM, members=(member(1, "alice"), member(2, "bob", connected=False)))
    run.answers[2, EvidenceKind.STATE] = NotAdmitted(reason="peer 2 has no connection")
    run.answers[2, EvidenceKind.PROCESS] = {"process": {"pid": 77, "state": "gone"}}
    done = run.why("--json")
    assert [one["cause"] for one in json.loads(done.stdout)["blame"]] == ["GONE"]


def test_a_master_without_a_run_waits(run: Run) -> None:
    run.status = replace(CALM, member_count=0, members=(), waits_for="no member has returned")
    done = run.why()
    assert done.exit_code == 4
    assert done.stdout.splitlines()[1:] == [
        "waiting: this master coordinates no run: no member has returned"
    ]


def waiting(status: MasterStatus) -> MasterStatus:
    """All are in calls, so nobody holds them up as far as the master knows."""
    members = tuple(replace(one, calls="tag 0 (barrier)") for one in status.members)
    return replace(status, members=members, operations=SAMPLE.operations)


@pytest.mark.parametrize("absent", [False, True])
def test_evidence_that_decides_nothing(run: Run, absent: bool) -> None:
    run.status = waiting(WAITS)
    if absent:
        run.answers[3, EvidenceKind.STATE] = LinkError(reason="too slow")
    done = run.why()
    assert done.exit_code == 4
    last = done.stdout.splitlines()[-1]
    words = "the evidence names no member"
    assert last == (words if absent else f"{words}: perhaps all compute")


def test_of_many_members_those_that_others_wait_for_are_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(why, "ASKED_MAX", 1)
    run.status = replace(CALM, members=(member(1, "alice"), member(2, "bob", awaited_ms=5000)))
    done = run.why("--json")
    assert {peer for peer, _ in run.asked} == {2}
    further = "1 further member: the command asks at most 1"
    assert json.loads(done.stdout)["no_evidence"] == [further]


def test_no_status_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> MasterStatus:
        raise LinkError(reason="connection refused")

    failing: Callable[..., MasterStatus] = fail
    monkeypatch.setattr(pccl, "master_status", failing)
    done = run.why()
    assert done.exit_code == 1
    assert "no status from 127.0.0.1:1: connection refused" in done.output


def test_links_that_could_be_better_and_how(run: Run) -> None:
    members = (*CALM.members, member(3, "carol"))
    run.status = replace(CALM, member_count=3, members=members, links=SAMPLE.links)
    done = run.why()
    assert done.exit_code == 0
    assert done.stdout.splitlines()[2:] == [
        "link of peers 1 (alice), 2 (bob): relayed by peer 3 (carol): neither peer 1 (alice) nor "
        "peer 2 (bob) can be dialled, and simultaneous open has not succeeded; open a port of one "
        "of them, or switch on port mapping: docs/two-machines.md",
    ]
    (link,) = json.loads(run.why("--json").stdout)["links"]
    assert link["peers"] == [1, 2]
    assert link["path"] == "relayed by peer 3 (carol)"
    assert link["why"].startswith("neither peer 1 (alice) nor")
    assert link["remedy"].startswith("open a port of one of them")


def test_of_many_such_links_the_relayed_ones_are_named(run: Run) -> None:
    relayed = SAMPLE.links[0]
    back = [
        replace(relayed, peer=PeerId(n), relay=None, path=LinkPath.DIALLED_BACK)
        for n in range(10, 19)
    ]
    run.status = replace(CALM, links=(*back, relayed))
    lines = run.why().stdout.splitlines()[2:]
    assert len(lines) == why.LINKS_SHOWN_MAX + 1
    assert lines[0].startswith("link of peers 1 (alice), 2 (bob): relayed by peer 3")
    assert lines[-1] == "... and 2 more such links"
