"""Questions to peers, whatever happens to the run: each ends in time; only silence is silence."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    InspectProcess,
    MasterEffect,
    ProcessInspected,
    SendTo,
)
from pccl.machines.master.inquiries import ANSWER_S_MAX
from pccl.protocol import messages as msg
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.types import PeerId
from tests.support.master_stage import SECOND, MasterStage, closed
from tests.support.scenarios import key, roster

MEMBERS = 3
TICK_S = 0.25


class Questioned:
    """A young run of three, to which members of an older run may return, and people who ask."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.stage = MasterStage()
        self.stage.blank()
        self.stage.together(*[0] * MEMBERS)
        self.last = 100
        """The newest connection of a person or of a peer that comes again."""
        self.open: dict[int, int] = {}
        """Connection of a person -> when the question must have ended."""
        self.asked: dict[int, int] = {}
        """Person -> the connection on which the peer was asked."""
        self.queries: list[tuple[int, int | None]] = []
        """Query, and the connection of the peer; None: the shell was asked."""

    @property
    def peers(self) -> dict[int, int]:
        """Connected peer -> its connection."""
        return {peer.id: at for at, peer in self.stage.machine.connections.peers.items()}

    def take(self, effects: list[MasterEffect], person: int | None = None) -> None:
        for effect in effects:
            match effect:
                case SendTo(connection, msg.EvidenceQuery(query)):
                    assert person is not None
                    self.asked[person] = connection
                    self.queries.append((query, connection))
                case InspectProcess(query):
                    self.queries.append((query, None))
                case SendTo(connection, msg.EvidenceReport() as report):
                    assert connection in self.open
                    if report.silent:
                        assert self.asked[connection] in self.peers.values()
                        assert self.stage.now_ns >= self.open[connection] - TICK_S * SECOND
                case _:
                    pass
        for connection in closed(effects):
            self.open.pop(connection, None)

    def step(self) -> None:
        rng, stage, self.last = self.rng, self.stage, self.last + 1
        peer = rng.randint(1, MEMBERS + 1)
        match rng.choice(
            ["ask"] * 6 + ["wait"] * 6 + ["reply"] * 2 + ["lose", "resume", "leave", "older"]
        ):
            case "ask":
                kind = rng.choice([EvidenceKind.STATE, EvidenceKind.PROCESS])
                stage.do(ConnectionOpened(self.last, "10.0.0.90", key(90)))
                self.open[self.last] = stage.now_ns + int((ANSWER_S_MAX + TICK_S) * SECOND)
                asked = msg.EvidenceRequest(PeerId(peer), kind)
                self.take(stage.hear(self.last, asked), self.last)
            case "wait":
                for _ in range(rng.choice([1, 4])):
                    self.take(stage.wait(TICK_S, *self.peers.values()))
                    assert all(stage.now_ns < end_ns for end_ns in self.open.values())
            case "reply" if self.queries:
                query, connection = rng.choice(self.queries)
                if connection is None:
                    self.take(stage.do(ProcessInspected(query, b"data", "")))
                elif connection in self.peers.values():
                    self.take(stage.hear(connection, msg.EvidenceReply(query, b"data")))
            case "lose" if peer in self.peers:
                self.take(stage.do(ConnectionClosed(self.peers[peer], "reset")))
            case "resume" if peer <= MEMBERS and not stage.machine.recovering:
                self.take(stage.resume(peer, self.last, stage.machine.membership.version))
            case "leave" if peer in self.peers and rng.random() < 0.3:
                self.take(stage.hear(self.peers[peer], msg.Goodbye()))
            case "older":
                known = (roster(7, 4, *range(1, rng.choice([4, 8]))),)
                self.take(stage.come(peer, connection=self.last, known=known))
            case _:
                pass


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_each_question_ends_in_time_and_only_silence_is_silence(seed: int) -> None:
    world = Questioned(seed)
    for _ in range(60):
        world.step()
