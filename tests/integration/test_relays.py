"""Two members of which neither can dial the other: another process forwards what they send."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pccl
from pccl.protocol.errors import NotAdmitted
from pccl.protocol.limits import Timing
from pccl.stress.emulator import LinkSpec, ProxyThread
from pccl.telemetry.link_paths import path_in_words
from pccl.transports import relay as relays
from pccl.transports.relay import SplicedEnd, relay_of
from tests.integration.conftest import Run
from tests.integration.test_undialable import check, shut
from tests.support.insides import engine_of, server_of
from tests.support.ports import free_port

QUICK_DIALS = Timing(
    heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, dial_s=1.0, redial_max_s=0.02
)
TOKEN = "a secret that all members know"
RELAYED = (
    "relayed by {}: neither peer 2 nor peer 3 can be dialled, and simultaneous open has not "
    "succeeded; open a port of one of them, or switch on port mapping: docs/two-machines.md"
)


def relay_between(one: pccl.Communicator, other: pccl.Communicator) -> int | None:
    """What carries the link of two members, as ``one`` knows it; None: nothing, or it is down."""
    link = engine_of(one).links.find(engine_of(other).machine.peer)
    return relay_of(link.lanes[0].connection) if link is not None else None


def path_between(run: Run, one: int, other: int) -> str:
    """What the status says of the path of a link, without names; empty: nothing yet."""
    links = [link for link in run.master.status().links if (link.peer, link.other) == (one, other)]
    return str(path_in_words(links[0])) if links else ""


def carried(member: pccl.Communicator) -> int:
    """How many bytes a member has forwarded."""
    return engine_of(member).keeper.relay.carried_bytes


def test_a_member_forwards_for_two_that_nobody_can_dial(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    run.join(**shut())
    run.join(**shut())
    for algorithm in ("ring", "mesh", "auto"):
        check(run, algorithm)
    first, second, third = run.members
    assert relay_between(second, third) == relay_between(third, second) == first.peer_id
    assert relay_between(first, second) is None
    run.until(
        lambda: path_between(run, 2, 3) == path_between(run, 3, 2) == RELAYED.format("peer 1")
    )
    assert path_between(run, 1, 2) == path_between(run, 3, 1) == "direct"
    assert carried(first) > 0
    assert carried(second) == carried(third) == 0


@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "token"])
def test_the_master_forwards_where_no_member_can(
    new_run: Callable[..., Run], token: str | None
) -> None:
    run = new_run(relay=True, token=token)
    for _ in range(3):
        run.join(**shut())
    for algorithm in ("ring", "mesh"):
        check(run, algorithm)
    for one in run.members:
        assert {relay_between(one, other) for other in run.members if other is not one} == {0}
    run.until(lambda: path_between(run, 3, 2) == RELAYED.format("the master"))
    relay = server_of(run.master).relay
    assert relay is not None
    assert relay.pairs == 3


def test_what_is_forwarded_is_encrypted_although_all_are_on_one_machine(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = bytearray()
    passes_on = SplicedEnd.buffer_updated

    def look(end: SplicedEnd, nbytes: int) -> None:
        seen.extend(end.get_buffer()[:nbytes])
        passes_on(end, nbytes)

    monkeypatch.setattr(relays.SplicedEnd, "buffer_updated", look)
    run = new_run(relay=True)
    for _ in range(2):
        run.join(**shut())
    values = np.frombuffer(b"What nobody may see. " * 1000, np.uint8)
    given, results = [values, np.zeros_like(values)], [np.empty_like(values) for _ in range(2)]
    run.reduce(given, results)
    assert all(np.array_equal(result, values) for result in results)
    assert len(seen) > values.nbytes
    assert b"nobody may see" not in seen


def test_a_relay_that_alters_bytes_costs_connections_and_changes_nothing(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    altered: list[int] = []
    passes_on = SplicedEnd.buffer_updated

    def alter(end: SplicedEnd, nbytes: int) -> None:
        before, after = end.carried_bytes, end.carried_bytes + nbytes
        for place in (3_000, 150_000):  # in the handshake's wake, and among the values
            if before <= place < after and len(altered) < 3:
                end.get_buffer()[place - before] ^= 0x10
                altered.append(place)
        passes_on(end, nbytes)

    monkeypatch.setattr(relays.SplicedEnd, "buffer_updated", alter)
    run = new_run(0, QUICK_DIALS, relay=True)
    for _ in range(2):
        run.join(**shut())
    given = [np.arange(100_000, dtype=np.float32) * factor for factor in (1, 2)]
    for _ in range(3):
        results = [np.empty_like(values) for values in given]
        run.reduce(given, results)
        for result in results:
            assert np.array_equal(result, np.arange(100_000, dtype=np.float32) * 3)
    assert len(altered) >= 2


def test_the_link_goes_on_through_another_relay_when_its_relay_leaves(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(2, QUICK_DIALS)
    one, other = run.join(**shut()), run.join(**shut())
    check(run, "mesh")
    by = relay_between(one, other)
    (relay,) = (member for member in run.members if member.peer_id == by)
    run.members.remove(relay)
    (then,) = (member for member in run.members if member not in (one, other))
    relay.close()
    run.until(lambda: relay_between(one, other) == then.peer_id)
    run.check()  # tells them of the loss
    check(run, "mesh")


def test_a_link_becomes_direct_when_a_port_is_opened(new_run: Callable[..., Run]) -> None:
    run = new_run(0, QUICK_DIALS, relay=True)
    listen, advertised = (f"127.0.0.1:{free_port()}" for _ in range(2))
    one, other = run.join(listen=listen, advertise=advertised), run.join(**shut())
    assert relay_between(one, other) == relay_between(other, one) == 0
    with ProxyThread(listen, LinkSpec(), listen=advertised):
        run.until(lambda: relay_between(one, other) is relay_between(other, one) is None)
        check(run, "ring")
        run.until(lambda: {path_between(run, *pair) for pair in ((1, 2), (2, 1))} == {"direct"})


def test_a_newcomer_reads_what_could_forward_for_it(new_run: Callable[..., Run]) -> None:
    timing = Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, link_s=1.0, dial_s=1.0)
    run = new_run(0, timing)
    run.join(**shut())
    newcomer = run.newcomer(**shut())
    with pytest.raises(NotAdmitted, match="pccl master --relay"):
        newcomer.connect(timeout_s=60.0)
