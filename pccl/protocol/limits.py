"""Every deadline and every bound of the protocol.

``Timing`` may be set per process; the constants are part of the protocol. The first paragraph of a
docstring says what the constant bounds and what happens beyond; if it does not, the connection or
lane is closed. It becomes a line of ``docs/protocol/limits.md`` (run ``python -m pccl.stress
reference``). Reasons follow after it. Constants before the first heading are not on that page:
sizes, and bounds that no user meets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pccl.protocol.types import NS_PER_S

PROTOCOL_VERSION = 10
"""Both sides refuse a connection of another version."""

INCUMBENT_BYTES = 8
"""Random id of a master, which tells it from other masters. It is no secret."""

RESUME_TOKEN_BYTES = 16
"""Random secret that proves that a peer is the one that was registered."""

TOKEN_DIGEST_BYTES = 16
"""Digest of a resume token, by which another master recognizes the peer."""

TERM_GAP = 1 << 20
"""A master that takes up a run skips so many peer ids, views and roster versions. So it never gives
out a number of an earlier master again, of which it may not have heard."""

ID_JUMP_BYTES = 3
"""It skips so many more peer ids as a random number of this size says. So two masters give out
different ids."""

ID_JUMP_MAX = TERM_GAP + (1 << 8 * ID_JUMP_BYTES)
"""The longest jump of ids. A returning newcomer with a higher id is refused."""

REQUEST_BYTES_MIN = 1 << 10
"""What a reported request, outcome or answer counts at least: each stands for something that the
master makes of it."""

ROSTER_BYTES_MIN = 4 << 10
"""What a reported roster counts at least: each is looked at whenever the run is put together."""

EAGER_SEGMENT_BYTES = 64 << 10
"""The smallest segment of a tensor that goes ahead, unless a size is fixed: it has one per rank."""

MESSAGE_COST_BYTES = 64
"""What each message adds to what its sender costs."""

TURN_BYTES_MAX = 8 << 10
"""Read from one connection before all others have their turn.

That is at most some 700 messages, about 20 ms."""

WAITS_NAMED_MAX = 64
"""Operations that one report of a long wait names; the rest is counted."""

LOG_INTERVAL_NS = 10 * NS_PER_S
"""The interval of ``LOG_LINES_MAX``."""

SEATED_AT_ONCE_MAX = 128
"""Peers in a run without members. With more, the master admits newcomers only at ticks."""

ASKED_BEATS_MAX = 15
"""Heartbeats after which an elder stops dialling an unproven newcomer.

It is longer than ``link_s``, after which a newcomer that needs this link is refused."""

JOIN_REASONS_MAX = 3
"""Different reasons that a failed ``connect`` names, the last ones."""

NEWS_KEPT_MAX = 16
"""Recent events of a peer, for people. The oldest are forgotten."""

SHARED_CONNECTIONS_MAX = 256
"""All links between machines that one peer uses have about so many lanes together, unless a number
was set. So with more than 16 such links each has fewer."""

RECOVERED_OWED_MAX = 1 << 20
"""Reported outcomes, times the members that lack each; likewise answers. Those that most members
lack are forgotten.

As many operations as one member may have open, in a run of 64."""

OPEN_VIEWS_MAX = 1024
"""Open views of a reported roster.

Each admission leaves at most one view behind."""

REPORTED_MAX = 1 << 62
"""Any number in a report.

There is room above for all that is given out after it."""

TERM_MAX = 1 << 31
"""A term in a report."""

SECONDS_MAX = 10 * 365 * 24 * 3600
"""Any deadline. It raises ``ValueError``."""

# -- control messages ----------------------------------------------------------------------------

CONTROL_MESSAGE_BYTES_MAX = 1 << 20
"""One message, if its fields can take so much.

The largest message is a roster: about 40 bytes a member, so thousands of members fit."""

HEARTBEAT_BYTES_MAX = 40 << 10
"""One heartbeat; a busy peer sends several.

It is the largest message of a member: the rest of the run waits some 60 ms until it is decoded."""

NEWCOMER_BYTES_MAX = 4 << 10
"""One message of a peer that is not admitted."""

NEWCOMERS_BYTES_PER_S = 2 << 20
"""Messages of strangers, newcomers and late returns, plus 64 bytes each. The master reads later
from sources that used more than an equal share.

It is about half a processor. A thousand newcomers that join at once send a tenth of it."""

NEWCOMERS_BURST_BYTES = 1 << 20
"""The same, at once after a pause. Then the rate counts."""

NEWCOMERS_SOURCES_MAX = 1024
"""Sources with their own share. Further sources have one share in common."""

PROGRESS_BATCH_MAX = 128
"""Operations in one heartbeat; another one reports the rest."""

FLOWS_MAX = 1024
"""Flows in one heartbeat. The rest is left out, and a mesh that is stuck there goes unnoticed."""

ACKNOWLEDGED_BATCH_MAX = 64
"""Acknowledgements that wait for a heartbeat. It is then sent at once."""

LINKS_BATCH_MAX = 64
"""Measured links in one message; another one reports the rest."""

STANDBYS_MAX = 16
"""Masters in one message."""

BYTE_STRING_MAX = 64
"""Bytes of an id, token or digest."""

TEXT_BYTES_MAX = 4096
"""A text. The sender cuts a longer one."""

REASON_BYTES_MAX = 256
"""A reason that a peer gives, or that an outcome quotes. The same happens.

A master keeps many of them."""

HOST_CHARACTERS_MAX = 253
"""Bytes of a host name.

A longer one cannot exist (RFC 1035)."""

SEQUENCE_ITEMS_MAX = 65536
"""Items of any other list.

So a short message cannot unfold into much memory."""

RTT_NS_MAX = 60 * NS_PER_S
"""Reported round trip of a link; a longer one counts as this."""

BYTES_PER_S_MAX = 10**12
"""Reported rate of a link; a higher one counts as this."""

# -- ports and connections -----------------------------------------------------------------------

DESCRIPTORS_WANTED = 16384
"""A process raises its soft limit of descriptors to this, or to the hard limit.

That is enough for all peers of the largest run and the strangers at its port, or for a few lanes to
each of a thousand peers."""

UNPROVEN_MAX = 1024
"""Connections of a port during the handshake; at most a quarter of the descriptors. The source with
the most loses one.

A whole run may come back at once."""

NEWCOMERS_MAX = 1024
"""Connections to a master before their first message; links to unknown newcomers of a peer. The
same happens."""

LINGERING_MAX = 256
"""Closed connections with unread last messages; at most a sixteenth of the descriptors. The same
happens."""

LINGER_S = 5.0
"""Time to read that message."""

LOG_LINES_MAX = 10
"""Log lines about strangers in 10 s, for each level. One more line counts the rest."""

LANES_MAX = 256
"""Lanes of one link; 1 to a newcomer that is not known yet.

Each lane costs two descriptors and their buffers in the kernel."""

LANES_BETWEEN_MACHINES = 16
"""Lanes of a link between machines, by default; fewer with more than 16 such links.

That is enough where one connection may have a sixteenth of the line, and no slower where one is
enough."""

# -- joining -------------------------------------------------------------------------------------

PEERS_MAX = 3840
"""Peers registered at one master. The newcomer is refused.

A roster of so many, with the longest host names, fits a message."""

PENDING_MAX = 1024
"""Newcomers that wait. The oldest one from the source with the most is removed (``CROWDED_OUT``).

Each newcomer dials all older ones, so the cost grows with the square of their number."""

TESTS_AT_ONCE_MAX = 64
"""Newcomers whose addresses are tested at once. The rest is admitted without a test.

Enough for a crowd that joins together. Each test makes up to three dials to an address that a
holder of the token has chosen."""

TESTS_PER_S = 8
"""Such tests after that.

Nobody can make a master or a member dial unproven addresses more often."""

ASKED_MAX = 256
"""Newcomers that an elder dials because they cannot dial it. The rest waits for a later tick."""

ASKED_UNPROVEN_MAX = 16
"""Those of them that neither a test nor the elder has reached. The same happens.

They are dialled every two seconds, so they cause no more dials than the tests of addresses."""

ELDERS_UNPROVEN_MAX = 16
"""Older newcomers that no test has reached, and that a newcomer dials. It dials more if it needs
the link.

So a process that registers many times at a foreign address causes few dials to it."""

# -- operations ----------------------------------------------------------------------------------

OPERATIONS_OPEN_MAX = 16384
"""Undecided operations of one member. The call raises ``PCCLError``."""

TAGS_PER_VIEW_MAX = 65536
"""Different tags in one view. The next ``update_topology`` opens a new view.

So the numbers of tags that are never used again do not pile up."""

EARLY_STORE_BYTES_MAX = 256 << 10
"""Frames of one link for operations that are not posted.

Senders keep account of it."""

EAGER_BYTES_MAX = 64 << 10
"""A tensor that goes ahead; a larger one waits for the start.

For a larger one, the time of one message hardly shows, and a few would fill an early store."""

# -- reports and acknowledgements ------------------------------------------------------------------

OWED_MAX = 65536
"""Unacknowledged outcomes and answers of a member. It is disconnected, and cannot resume."""

REPORT_BYTES_MAX = 32 << 20
"""The report of a returning peer.

That is the request (1 KiB) of each operation that it may have open, and a dozen of the fullest
rosters, or hundreds of usual ones."""

REPORTS_BYTES_MAX = 256 << 20
"""All reports to a master. The connection of the largest is closed.

A run of 1,000 members, each of which is linked to each, needs 160 MiB; a roster that several peers
report counts once."""

# -- what is kept: the oldest are forgotten -----------------------------------------------------

ROSTERS_KEPT_MAX = 256
"""Rosters of a group for members that return."""

REMOVED_KEPT_MAX = 4096
"""Removed peers that can still learn the cause."""

MISSED_KEPT_MAX = 16
"""Outcomes that a late caller of a tag still gets."""

HISTORY_EVENTS_MAX = 256
"""Events in the story of a machine.

Enough to see a whole join or a whole aborted operation when a machine fails."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of one process, in seconds; ``docs/protocol/limits.md`` lists them."""

    heartbeat_s: float = 1.0
    """Between heartbeats, both ways."""
    tick_s: float = 0.25
    """Between looks at the deadlines."""
    deadline_s: float = 10.0
    """Silence of a peer that others wait for, before it is removed."""
    resume_s: float = 2.0
    """To resume a lost control connection. One unanswered dial uses it up."""
    lane_stall_s: float = 10.0
    """Before a lane that owes data and moves none is replaced. It is pinged after half of it."""
    progress_s: float = 30.0
    """Without progress of a started operation: longer than two stalled lanes."""
    link_s: float = 10.0
    """For a newcomer to link to its neighbours, before it is refused."""
    dial_s: float = 5.0
    """For one dial, and for one handshake."""
    redial_min_s: float = 0.02
    """The first pause between dials."""
    redial_max_s: float = 0.5
    """The longest pause between dials."""
    connect_retry_s: float = 1.0
    """Between attempts of ``connect`` to find a master."""
    hold_s: float = 30.0
    """For which outdated members may delay a synchronization. Then they join again."""
    lockstep_s: float = 1.0
    """Of waiting for different calls, before ``LockstepError``."""
    waiting_report_s: float = 5.0
    """Of waiting, before the log names the members that a call waits for."""
    recovery_s: float = 5.0
    """For members to return to another master: ten of their longest pauses."""
    master_lost_s: float = 60.0
    """Without a master, before ``MasterLost``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number of seconds, not {value!r}")
            if not 0 < value <= SECONDS_MAX:
                raise ValueError(f"{field.name} must be above 0 and at most {SECONDS_MAX}")

    def ns(self, seconds: float) -> int:
        """Seconds as integer nanoseconds."""
        return round(seconds * NS_PER_S)
