"""Members that nobody can dial: they dial the others, and nobody is refused for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pccl.protocol.errors import NotAdmitted
from pccl.protocol.limits import Timing
from tests.integration.conftest import Run
from tests.support.patience import LIMIT_S
from tests.support.ports import free_port
from tests.support.unnamed import unnamed


def shut() -> dict[str, Any]:
    """Options of a member that tells the others a port at which nobody listens."""
    return {"advertise": f"127.0.0.1:{free_port()}", "listen": f"127.0.0.1:{free_port()}"}


def check(run: Run, algorithm: str) -> None:
    size = len(run.members)
    results = [np.zeros(3, np.float32) for _ in range(size)]
    run.reduce([np.ones(3, np.float32) for _ in range(size)], results, algorithm=algorithm)
    assert [result.tolist() for result in results] == [[size] * 3] * size


def test_a_member_that_nobody_can_dial_costs_no_newcomer_its_place(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    """Every newcomer after it was refused, ten seconds later."""
    run = new_run(1)
    with caplog.at_level(logging.WARNING, "pccl.peer"):
        run.join(**shut())
    (warning,) = [r.message for r in caplog.records if "peers cannot dial this peer" in r.message]
    advertised = run.members[1].members()[run.members[1].rank]
    assert f"at 127.0.0.1:{advertised.port} (peer 1: cannot reach" in warning
    assert "open that port, or advertise another address" in warning
    for _ in range(3):
        run.join()
    for algorithm in ("ring", "mesh"):  # each of the others has a link to it
        check(run, algorithm)


def test_two_members_that_nobody_can_dial_are_no_neighbours(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    shut_ones = [run.join(**shut()).peer_id]
    for _ in range(2):
        run.join()
    shut_ones.append(run.join(**shut()).peer_id)
    ring = [member.peer_id for member in run.members[0].members()]
    one, other = (ring.index(peer) for peer in shut_ones)
    assert abs(one - other) not in (1, len(ring) - 1)
    check(run, "ring")
    check(run, "auto")


def test_where_no_ring_avoids_them_the_newcomer_reads_both_addresses(
    new_run: Callable[..., Run],
) -> None:
    timing = Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, link_s=1.0, dial_s=1.0)
    run = new_run(0, timing)
    first = run.newcomer(**shut())
    first.connect()
    second = run.newcomer(**shut())
    with pytest.raises(NotAdmitted, match="no ring avoids the pair") as caught:
        second.connect(timeout_s=LIMIT_S)
    assert "peer 2 cannot dial peer 1 at 127.0.0.1:" in unnamed(caught.value)
    assert "peer 1 cannot dial peer 2 at 127.0.0.1:" in unnamed(caught.value)
