"""The lines of the log: what each event says, and how often waits are worth a warning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from pccl.protocol.limits import TERM_GAP
from pccl.telemetry import events as tell
from pccl.telemetry.stream import Stamped
from pccl.telemetry.words import Level, LogWords, line_of

SECOND = 1_000_000_000
LONG = TERM_GAP + 7_000_003
"""The id of a peer that joined after a restart of the master."""
WAITING = tell.Waiting(call="barrier", waits_for="peer 3 (carol)", waited_s=2)
ENDED = tell.WaitingEnded(call="barrier", waited_s=1.25)
LOST = tell.MemberLost(peer_id=3, name="carol", cause="", reason="", world_size=1)
CALL = tell.CallEnded(
    call="all_reduce", tag=1, outcome="ok", reason="", seconds=0.25, attempts=1, tx_bytes=0,
    rx_bytes=0, waited_s=0.0, moved_s=0.0,
)  # fmt: skip


def joined(*, rejoined: bool, peer_id: int = 4) -> tell.Joined:
    return tell.Joined(
        peer_id=peer_id, name="me", run="0123456789abcdef" * 2, rank=0, world_size=2,
        rejoined=rejoined, away_s=2.25 * rejoined,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (joined(rejoined=False), "INFO", "joined the run 01234567 as peer 4 (me), rank 0 of 2"),
        (
            joined(rejoined=False, peer_id=LONG),
            "INFO",
            "joined the run 01234567 as peer me, rank 0 of 2",
        ),
        (
            joined(rejoined=True),
            "WARNING",
            "rejoined the run as peer 4 (me), rank 0 of 2, after 2.2 s",
        ),
        (
            tell.MembershipLost(cause="SILENT", reason="silent for 10.0 s"),
            "WARNING",
            "is no longer a member [SILENT]: silent for 10.0 s",
        ),
        (
            tell.MembershipLost(cause="SILENT", reason="evicted: silent [SILENT]"),
            "WARNING",
            "is no longer a member: evicted: silent [SILENT]",
        ),
        (tell.MembershipLost(cause="CLOSED", reason="closed"), "INFO", "left the run"),
        (
            tell.MemberJoined(peer_id=3, name="carol", host="10.0.0.3", world_size=2),
            "INFO",
            "peer 3 (carol) joined from 10.0.0.3; the group has 2 members",
        ),
        (
            tell.MemberJoined(peer_id=3, name="", host="10.0.0.3", world_size=2),
            "INFO",
            "peer 3 joined from 10.0.0.3; the group has 2 members",
        ),
        (LOST, "WARNING", "peer 3 (carol) left or failed; the group has 1 member"),
        (
            tell.MemberLost(peer_id=3, name="carol", cause="GOODBYE", reason="left", world_size=1),
            "INFO",
            "peer 3 (carol) left; the group has 1 member",
        ),
        (
            tell.MemberLost(peer_id=3, name="", cause="SILENT", reason="for 9 s", world_size=2),
            "WARNING",
            "peer 3 is gone [SILENT]: for 9 s; the group has 2 members",
        ),
        (
            tell.MasterDisconnected(reason="reset", gives_up_s=58.75),
            "WARNING",
            "lost the master, retrying for 59 s: reset; if it has ended, start it again at the "
            "same address",
        ),
        (
            tell.MasterReconnected(away_s=3.25, term=2),
            "WARNING",
            "the master is back after 3.2 s (term 2)",
        ),
        (WAITING, "WARNING", "barrier has waited 2 s for peer 3 (carol)"),
        (
            replace(WAITING, others=1),
            "WARNING",
            "barrier and 1 other have waited 2 s for peer 3 (carol)",
        ),
        (
            replace(WAITING, others=2),
            "WARNING",
            "barrier and 2 others have waited 2 s for peer 3 (carol)",
        ),
        (ENDED, "WARNING", "barrier waits no longer, after 1.2 s"),
        (
            tell.LinkLost(peer_id=3, name="carol", reason="reset"),
            "WARNING",
            "lost the link to peer 3 (carol), dialling again: reset",
        ),
        (
            tell.LinkRestored(peer_id=3, name="carol", away_s=0.5),
            "WARNING",
            "the link to peer 3 (carol) works again, after 0.5 s",
        ),
        (
            tell.ContributionFlagged(
                tag=3, peer_id=4, name="dave", norm=None, limit=None, excluded=True
            ),
            "WARNING",
            "tag 3: the contribution of peer 4 (dave) is not finite; the average excludes it",
        ),
        (
            tell.ContributionFlagged(
                tag=3, peer_id=4, name="dave", norm=812.5, limit=31.25, excluded=False
            ),
            "WARNING",
            "tag 3: the contribution of peer 4 (dave) has a norm of 812, above the limit of 31.2; "
            "the average contains it",
        ),
        (
            tell.LargePacketsLost(peer_id=3, name="carol", segment_bytes=1200),
            "WARNING",
            "large packets vanish between this peer and peer 3 (carol); segments of 1200 bytes "
            "pass; lower the MTU of the VPN or tunnel between them, or let ICMP through its "
            "firewall",
        ),
        (tell.AddressUnreachable(reason="no peer can dial it"), "WARNING", "no peer can dial it"),
        (
            tell.PortForwarded(port=48200, host="8.8.4.4", by="PCP", public=True),
            "INFO",
            "the router forwards port 48200 of 8.8.4.4 to this peer (PCP)",
        ),
        (
            tell.PortForwarded(port=48200, host="", by="NAT-PMP", public=False),
            "INFO",
            "the router forwards port 48200 to this peer (NAT-PMP)",
        ),
        (
            tell.PortForwarded(port=48200, host="100.72.0.4", by="UPnP", public=False),
            "INFO",
            "the router forwards port 48200 of 100.72.0.4 to this peer (UPnP), but this address is "
            "not public: a router before it must forward the port, too",
        ),
        (
            tell.PortNotForwarded(port=0, reason="PCP: no answer"),
            "INFO",
            "the router forwards no port to this peer: PCP: no answer",
        ),
        (
            tell.PortNotForwarded(port=48200, reason="this peer is closed"),
            "INFO",
            "the router no longer forwards port 48200 to this peer: this peer is closed",
        ),
        (
            tell.RunChanged(
                what="admitted", peer_id=3, name="carol", group=1, cause="", reason="size 2"
            ),
            "INFO",
            "peer 3 (carol) of group 1 admitted: size 2",
        ),
        (
            tell.RunChanged(
                what="removed", peer_id=3, name="carol", group=1, cause="SILENT", reason="for 9 s"
            ),
            "WARNING",
            "peer 3 (carol) of group 1 removed: SILENT: for 9 s",
        ),
        (CALL, "DEBUG", "all_reduce ended after 0.250 s"),
    ],
)
def test_each_event_has_its_words(event: tell.PeerReport, level: str, text: str) -> None:
    found, said = line_of(event)
    assert (found.name, said) == (level, text)


def warned(seconds: Iterable[float]) -> list[float]:
    """Of reports of waits at these times: those that are worth a warning."""
    words = LogWords()
    return [
        at_s
        for at_s in seconds
        if words.line(Stamped(round((1000 + at_s) * SECOND), WAITING))[0] is Level.WARNING
    ]


def test_one_long_wait_is_warned_of_whenever_it_is_reported() -> None:
    """The master reports it after pauses that double, too."""
    reports = [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert warned(reports) == reports


def test_waits_in_every_round_are_warned_of_ever_more_seldom() -> None:
    found = warned(range(0, 3600, 3))
    assert found[:6] == [0, 3, 9, 18, 36, 69]
    pauses = [later - earlier for earlier, later in pairwise(found)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 300
    assert len(found) == 19


def test_after_twice_the_pause_without_a_wait_the_next_is_warned_of_soon() -> None:
    busy = [0, 3, 6, 9, 12, 15, 18]  # warnings at 0, 3, 9 and 18: the next pause has 16 s
    assert warned([*busy, 20, 34]) == [0, 3, 9, 18, 34]
    assert warned([*busy, 51, 53, 55, 57]) == [0, 3, 9, 18, 51, 53, 57]


def test_the_end_of_a_wait_is_as_loud_as_its_reports() -> None:
    words, levels = LogWords(), list[str]()
    events: list[tell.PeerReport] = [WAITING, ENDED, WAITING, ENDED, WAITING, WAITING, ENDED]
    for at_s, event in enumerate(events):
        levels.append(words.line(Stamped(at_s * SECOND // 2, event))[0].name)
    assert levels == ["WARNING", "WARNING", "DEBUG", "DEBUG", "WARNING", "DEBUG", "WARNING"]


def test_other_events_are_as_loud_as_ever() -> None:
    words = LogWords()
    for _ in range(9):
        assert words.line(Stamped(SECOND, LOST)) == line_of(LOST)
