"""The lines of ``pccl status``."""

from __future__ import annotations

import re
from dataclasses import replace

from pccl.cli.status_view import KINDS, lines
from pccl.inquiry import LinkSpeed
from pccl.protocol.limits import TERM_GAP
from pccl.protocol.types import PeerId
from tests.support.statuses import REDUCE, SAMPLE, ended, with_long_ids


def test_each_line_names_peers_and_what_they_do() -> None:
    shown = list(lines(SAMPLE))
    assert shown[0].endswith("1 open round, 1 operation in flight, 1 removed")
    assert shown[1] == "speed: 1.2 calls/s, 3.30 MB/s, 1281 calls ended"
    assert shown[2] == (
        "slowest: peer 2 (bob), last in 3 of the 4 last calls, 31.0 ms after the first on average"
    )
    told = "\n".join(shown)
    for line in (
        "member 2 (bob): group 0, rank 2, 10.0.0.2:48202, connected, heard 0.2 s ago, awaited for "
        "3.2 s, step 1196, loss 2.5, 1.92 steps/s, in no call",
        "member 4 (dave): group 0, rank 3, 10.0.0.4:48204, NOT CONNECTED, heard 6.1 s ago, awaited "
        "for 6.0 s, no step, in no call",
        "round update_topology #3: 2 of 4 have called, peers 2 (bob), 4 (dave) missing for 3.2 s",
        f"ended {REDUCE} of group 0: 2.1 s ago, MEMBER_LOST, took 250 ms, 2 (bob) came last, "
        "31.0 ms after the first",
        "link 2 (bob) to 1 (alice): round trip 1.80 ms, 12.4 MB/s, relayed by peer 3 (carol): "
        "neither peer 1 (alice) nor peer 2 (bob) can be dialled, and simultaneous open has not "
        "succeeded; open a port of one of them, or switch on port mapping: docs/two-machines.md",
        "link 3 (carol) to 1 (alice): round trip 2.70 ms, 1.09 GB/s, direct",
        "removed peer 9 (ivan) of group 0 65.0 s ago: SILENT, silent for 10.0 s",
    ):
        assert line in told


def test_no_long_id_is_shown_of_a_peer_with_a_name() -> None:
    """Ids are long after a restart of the master."""
    shown = "\n".join(lines(with_long_ids(SAMPLE)))
    assert "waits for a link to peer alice: none" in shown
    assert "link bob to alice" in shown
    rest = shown.partition("\n")[2]  # the headline has the id of the run
    assert max(map(int, re.findall(r"\b\d+\b", rest))) <= TERM_GAP


def test_the_slowest_links_and_the_newest_calls_are_shown() -> None:
    links = tuple(LinkSpeed(PeerId(1), PeerId(n), 0, n) for n in range(100))
    many = replace(SAMPLE, links=links, link_count=200, ended=(ended(),) * 32)
    by_name = {kind.name: kind for kind in KINDS}
    first, *_ = by_name["link"].rows(many)
    assert first == ("1 (alice) to 1 (alice)", "round trip unknown", "1 B/s", "no link")
    assert len(by_name["link"].rows(many)) + by_name["link"].left_out(many) == 200
    assert len(by_name["ended call"].rows(many)) < 32
