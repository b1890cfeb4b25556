"""The names of peers in texts for people."""

from __future__ import annotations

from pccl.protocol.limits import TERM_GAP
from pccl.protocol.types import PeerId
from pccl.telemetry.names import Names

LONG = TERM_GAP + 7_654_321


def test_a_name_stands_beside_a_short_id_and_for_a_long_one() -> None:
    names = Names()
    assert names.explain(f"peer {LONG} left") == f"peer {LONG} left"
    for peer, name in ((3, "alice"), (LONG, "bob")):
        names.note(PeerId(peer), name)
    assert names.explain(f"peer {LONG} left, 3 rounds") == "peer bob left, 3 rounds"
    told = f"waits for peers 2, 3, {LONG}, {LONG + 1}"
    assert names.explain(told) == f"waits for peers 2, 3 (alice), bob, {LONG + 1}"


def test_a_time_is_no_id() -> None:
    names = Names()
    names.note(PeerId(3), "alice")
    assert names.explain("evicted this peer 3.0 s ago by peer 3.") == (
        "evicted this peer 3.0 s ago by peer 3 (alice)."
    )
