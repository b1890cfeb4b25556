"""Every deadline and every bound of the protocol.

A process may set its ``Timing``; the constants are part of the protocol. The first paragraph of a
docstring says what the constant limits, and what happens beyond the limit. If it names no effect,
the process closes the connection or lane. The paragraph becomes a line of
``docs/protocol/limits.md`` (run ``python -m pccl.stress reference``). Reasons follow it. That page
omits the constants before the first heading: sizes, and limits that no user meets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pccl.protocol.types import NS_PER_S

PROTOCOL_VERSION = 24
"""Both sides refuse a connection of another version."""

INCUMBENT_BYTES = 8
"""Length of a master's random id, which distinguishes it from other masters. It is no secret."""

TERM_GAP = 1 << 20
"""Peer ids, views and roster versions that a master skips when it continues a run. So it never
repeats a number that an earlier master assigned without its knowledge."""

ID_JUMP_BYTES = 3
"""Size of the random number of further peer ids that such a master skips. So two masters that
continue the same run assign different ids."""

ID_JUMP_MAX = TERM_GAP + (1 << 8 * ID_JUMP_BYTES)
"""The longest jump of ids. The master refuses a returning newcomer with a higher id."""

REQUEST_BYTES_MIN = 1 << 10
"""Bytes that a reported request, outcome or answer counts at least, because the master makes
objects of its own from each."""

ROSTER_BYTES_MIN = 4 << 10
"""Bytes that a reported roster counts at least, because each attempt to continue a run reads it."""

EAGER_SEGMENT_BYTES = 2 << 20
"""The smallest segment of a chunk that has several, if it may be sent before the start."""

ANNOUNCED_PARTS_MAX = 64
"""Most parts of an announced segment."""

ANNOUNCE_BYTES_MAX = (1 + ANNOUNCED_PARTS_MAX) * 16
"""The longest announcement: two numbers for each part, and two for the generation."""

MESSAGE_COST_BYTES = 64
"""Bytes that each message adds to the cost of its sender."""

TURN_BYTES_MAX = 8 << 10
"""Bytes that the master reads from one connection before all other connections have their turn.

That is at most some 700 messages, which take about 20 ms."""

EVIDENCE_BYTES_MAX = 256 << 10
"""Largest evidence that a peer sends, compressed. The peer omits the oldest entries."""

INQUIRIES_MAX = 64
"""Questions to peers that wait for an answer. The master refuses further questions."""

DEPARTURES_MAX = 32
"""Removals that one ``RosterChanged`` explains."""

DEPARTURE_BYTES_MAX = 400
"""The reason of a removal, as members learn it. A longer text is cut."""

WAITS_NAMED_MAX = 64
"""Operations that one report of a long wait names; it counts the rest."""

LOG_INTERVAL_NS = 10 * NS_PER_S
"""The interval of ``LOG_LINES_MAX``."""

DELTAS_MAX = 8
"""Deltas between the versions before, which a member keeps and announces with a version."""

VERSIONS_ANNOUNCED_MAX = 4
"""Versions that a member publishes at a time."""

HOLDERS_TOLD_MAX = 4
"""Members that the master names to one reader."""

ELDERS_TOLD_MAX = 12
"""Older readers that the master names to one reader: the next ones, and some far ones."""

SEATED_AT_ONCE_MAX = 128
"""Peers in a run without members. With more, the master admits newcomers only at ticks."""

ASKED_BEATS_MAX = 15
"""Heartbeats after which an elder stops dialling an unproven newcomer.

That is longer than ``link_s``, after which the master refuses a newcomer that needs this link."""

JOIN_REASONS_MAX = 3
"""Number of different reasons that a failed ``connect`` names: the last ones."""

SHARED_CONNECTIONS_MAX = 256
"""Lanes that all links of one peer to other machines have together, roughly, unless the user sets a
number. So with more than 16 such links each has fewer lanes."""

RECOVERED_OWED_MAX = 1 << 20
"""Reported outcomes, times the members that lack each; the same for answers. The master forgets
the ones that most members lack.

That is as many operations as one member may have open, in a run of 64."""

OPEN_VIEWS_MAX = 1024
"""Open views of a reported roster.

Each admission leaves at most one view open."""

REPORTED_MAX = 1 << 62
"""The largest number in a report.

A master has enough larger numbers for all later assignments."""

TERM_MAX = 1 << 31
"""The largest term in a report."""

STORE_KEY_BYTES_MAX = 256
"""A key of the run's store, in UTF-8. A longer one raises ``ValueError``."""

STORE_VALUE_BYTES_MAX = 64 << 10
"""A value of the run's store. A longer one raises ``ValueError``."""

STORE_ENTRY_BYTES = 256
"""Bytes that a key counts in addition to its name and its value."""

STORE_BYTES_MAX = 8 << 20
"""The run's store. Further writes raise ``PCCLError``."""

STORE_MEMBER_BYTES_MAX = 1 << 20
"""The keys in the store that one member wrote last. Further writes raise ``PCCLError``.

A member reports them to another master."""

STORE_KEPT_BYTES_MAX = 2 << 20
"""What a member keeps of its own writes for another master; the oldest are forgotten.

That is more than the store has of them, because others may have replaced some."""

STORE_READ_BYTES_MAX = 128 << 10
"""The same for what it has read. A thousand members may report that much."""

STORE_OPEN_MAX = 64
"""Unanswered requests of one member to the store. Further calls raise ``PendingOperations``."""

STORE_RECEIPTS_MAX = 64
"""Unacknowledged writes of a key that a member learns of with the key; the newest.

After the loss of the master, an older one may be carried out twice."""

STORE_KEYS_NAMED_MAX = 64
"""Keys of one request to the store; a call with more makes several requests."""

SECONDS_MAX = 10 * 365 * 24 * 3600
"""The longest deadline, in seconds. A longer one raises ``ValueError``."""

# -- control messages ----------------------------------------------------------------------------

CONTROL_MESSAGE_BYTES_MAX = 1 << 20
"""One message; less for many types.

The largest message is a roster: with about 40 bytes per member, thousands of members fit."""

HEARTBEAT_BYTES_MAX = 40 << 10
"""One heartbeat; a busy peer sends several.

It is the largest message of a member: the run waits some 60 ms until the master has decoded it."""

NEWCOMER_BYTES_MAX = 4 << 10
"""One message of a peer that is not admitted."""

NEWCOMERS_BYTES_PER_S = 2 << 20
"""Messages of strangers, newcomers and late returns, plus 64 bytes each. Sources that used more
than an equal share wait.

Decoding as much takes half a processor. A thousand newcomers that join at once send a tenth."""

NEWCOMERS_BURST_BYTES = 1 << 20
"""The same, at once after a pause."""

NEWCOMERS_SOURCES_MAX = 1024
"""Sources with their own share. Further ones share one."""

PROGRESS_BATCH_MAX = 128
"""Operations in one heartbeat; the next one has the rest."""

FLOWS_MAX = 1024
"""Flows in one heartbeat. The rest is omitted; a mesh may stall there unnoticed."""

ACKNOWLEDGED_BATCH_MAX = 64
"""Acknowledgements that wait for a heartbeat; then one is sent."""

LINKS_BATCH_MAX = 64
"""Measured links in one message; the next one has the rest."""

STANDBYS_MAX = 16
"""Masters in one message."""

BYTE_STRING_MAX = 64
"""Bytes of an id, key or digest."""

TEXT_BYTES_MAX = 4096
"""A text; a longer one is cut."""

REASON_BYTES_MAX = 256
"""A reason that a peer gives or an outcome quotes; a longer one is cut.

A master keeps many reasons."""

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

That is enough for all peers of the largest run and the unproven connections at its port, or for a
few lanes to each of a thousand peers."""

PROXY_FIELDS_BYTES_MAX = 1 << 10
"""Addresses and further fields of a PROXY header.

Addresses take 36 bytes, or 216. The rest is for certificates and the like, which nobody reads."""

UNPROVEN_MAX = 1024
"""Connections of a port during the handshake, and as many before a PROXY header; at most a quarter
of the descriptors. The largest source loses one.

All peers of a run may return at once."""

NEWCOMERS_MAX = 1024
"""Connections to a master before their first message; links of a peer to unknown newcomers. The
largest source loses one."""

LINGERING_MAX = 256
"""Closed connections with an unread message; at most a sixteenth of the descriptors. The largest
source loses one."""

LINGER_S = 5.0
"""Time to read that message."""

LOG_LINES_MAX = 10
"""Log lines about strangers in 10 s, for each level; one more counts the rest."""

LANES_MAX = 256
"""Lanes of one link; 1 to an unknown newcomer.

Each lane costs two descriptors and their buffers in the kernel."""

LANES_BETWEEN_MACHINES = 16
"""Lanes of a link between machines, by default; fewer with more than 16 such links.

That is enough where each connection gets a sixteenth of the line, and no slower than one lane
elsewhere."""

# -- joining -------------------------------------------------------------------------------------

PEERS_MAX = 2800
"""Peers registered at one master; more are refused.

A roster of all these peers, with the longest hosts and names, fits a message."""

PENDING_MAX = 1024
"""Waiting newcomers. The largest source loses its oldest one (``CROWDED_OUT``).

Each newcomer dials all older ones, so the cost grows with the square of their number."""

TESTS_AT_ONCE_MAX = 64
"""Newcomers whose addresses are tested at once. The rest is admitted without a test.

That is enough for many newcomers that join together. Each test makes up to three dials to an
address that a holder of the token has chosen."""

TESTS_PER_S = 8
"""Further tests of addresses.

No attacker can make a master or a member dial unproven addresses more often."""

QUERIES_AT_ONCE_MAX = 8
"""Addresses tested at once for processes outside the run."""

QUERIES_PER_S = 1
"""Further such tests. One at a time for each source address."""

PADDING_BYTES_MAX = 3000
"""Padding of an ``AddressQuery``: fills a packet of 1500 bytes, and begins another one."""

ASKED_MAX = 256
"""Newcomers that an elder dials because they cannot dial it. The rest waits."""

ASKED_UNPROVEN_MAX = 16
"""Such newcomers that neither a test nor the elder has reached.

The elder dials them every two seconds, so they cause no more dials than the tests of addresses."""

ELDERS_UNPROVEN_MAX = 16
"""Older newcomers that a newcomer dials although no test has reached them; more if it needs the
link.

So a process that registers a foreign address many times causes few dials to it."""

RELAYED_PAIRS_MAX = 256
"""Pairs of peers for which one relay forwards; then the master names another relay."""

RELAYED_WAIT_MAX = 16
"""Connections of one peer that wait at one relay; 16 times as many in all."""

READERS_MAX = 1024
"""Readers at one master. Further ones are refused."""

READER_LINKS_MAX = 64
"""Readers that one member or reader serves at a time. Further ones ask others.

Each costs two descriptors and a list of requested pieces."""

# -- operations ----------------------------------------------------------------------------------

OPERATIONS_OPEN_MAX = 16384
"""Undecided operations of one member. Further calls raise ``PCCLError``."""

TAGS_PER_VIEW_MAX = 65536
"""Different tags in one view. The next ``update_topology`` opens a new view.

So the counters of unused tags do not pile up."""

EARLY_STORE_BYTES_MAX = 256 << 10
"""Frames of one link for operations that are not posted.

Senders count their frames, and never exceed it."""

EAGER_BYTES_MAX = 64 << 10
"""A tensor that is sent early.

For a larger one, the time of one message hardly matters, and a few would fill an early store."""

ANNOUNCED_EARLY_BYTES_MAX = 16 << 20
"""A tensor that near members announce early.

A member that asks last pulls all that was announced at once, which blocks its I/O thread."""

# -- reports and acknowledgements ------------------------------------------------------------------

OWED_MAX = 65536
"""Unacknowledged outcomes and answers of a member. Then it is refused."""

REPORT_BYTES_MAX = 32 << 20
"""The report of a returning peer.

That is the request (1 KiB) of each operation that it may have open, and a dozen of the fullest
rosters, or hundreds of usual ones."""

REPORTS_BYTES_MAX = 256 << 20
"""All reports to a master. It closes the connection of the largest.

A run of 1,000 members with all links between them needs 160 MiB; a roster that several peers report
counts once."""

# -- what is kept: the oldest are forgotten -----------------------------------------------------

ROSTERS_KEPT_MAX = 256
"""Rosters of a group for members that return."""

REMOVED_KEPT_MAX = 4096
"""Removed peers that can still learn the cause."""

MISSED_KEPT_MAX = 16
"""Outcomes that a late caller of a tag still gets."""

HISTORY_EVENTS_MAX = 256
"""Events in the history of a machine.

That is enough to show a whole join or a whole aborted operation when a machine fails."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of one process, in seconds; ``docs/protocol/limits.md`` lists them."""

    heartbeat_s: float = 1.0
    """Interval of heartbeats, both ways."""
    tick_s: float = 0.25
    """Interval of checks of the deadlines."""
    deadline_s: float = 10.0
    """Silence of a peer that others wait for, before its removal."""
    resume_s: float = 2.0
    """Time to resume a lost control connection."""
    lane_stall_s: float = 10.0
    """Time without progress before a lane is replaced; after half of it, the peer pings."""
    progress_s: float = 30.0
    """Time without progress of a started operation."""
    link_s: float = 10.0
    """Time for a newcomer to link to its neighbours."""
    dial_s: float = 5.0
    """Time for one dial, and for one handshake."""
    redial_min_s: float = 0.02
    """The first pause between dials."""
    redial_max_s: float = 0.5
    """The longest pause between dials."""
    connect_retry_s: float = 1.0
    """Pause between attempts of ``connect``."""
    hold_s: float = 30.0
    """Time that outdated members may delay a synchronization, before their removal."""
    lockstep_s: float = 1.0
    """Wait for different calls, before ``LockstepError``."""
    waiting_report_s: float = 2.0
    """Time before the log names the members that a call waits for."""
    recovery_s: float = 5.0
    """Time for members to return to another master."""
    master_lost_s: float = 60.0
    """Time without a master, before ``MasterLost``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number of seconds, not {value!r}")
            if not 0 < value <= SECONDS_MAX:
                raise ValueError(f"{field.name} must be above 0 and at most {SECONDS_MAX} seconds")

    def ns(self, seconds: float) -> int:
        """Return seconds as integer nanoseconds."""
        return round(seconds * NS_PER_S)
