"""Every deadline and every bound of the protocol, each with its reason.

``Timing`` may be set per process; the constants are part of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pccl.protocol.types import NS_PER_S

PROTOCOL_VERSION = 10

TERM_GAP = 1 << 20
"""Ids of peers, numbers of views and roster versions jump by so much when a master is restarted:
what the one before had given out, and nobody who came back has heard of, is never given out again.
"""

ID_JUMP_BYTES = 3
"""By so many random bytes ids of peers jump further, so that no two masters give out the same."""

ID_JUMP_MAX = TERM_GAP + (1 << 8 * ID_JUMP_BYTES)
"""The longest jump of ids."""

INCUMBENT_BYTES = 8
"""Id of a master: it tells one from another, and is no secret."""

RESUME_TOKEN_BYTES = 16
"""Random: what a peer proves by that it is the one that was registered."""

TOKEN_DIGEST_BYTES = 16
"""Of the digest of a resume token, by which another master knows the peer."""

OPEN_VIEWS_MAX = 1024
"""Views in which one group may still decide: each admission leaves at most one behind."""

REPORT_BYTES_MAX = 32 << 20
"""Memory for what one returning peer reports: the request (1 KiB) of each of the operations that it
may have open, and a dozen of the fullest rosters, or hundreds of usual ones."""

REPORTS_BYTES_MAX = 256 << 20
"""Memory for all reports to one master. A run of 1,000 members, each of which is linked to each,
needs 160 MiB; rosters that several have been told count once. Beyond, the largest report has to
go."""

REQUEST_BYTES_MIN = 1 << 10
"""What a reported request, outcome or answer counts at least: each stands for something that the
master makes of it."""

ROSTER_BYTES_MIN = 4 << 10
"""What a reported roster counts at least: each is looked at whenever the run is put together."""

RECOVERED_OWED_MAX = 1 << 20
"""Outcomes that members lack after a recovery, times those members: as many operations as one
member may have open, in a run of 64. Likewise answers."""

REPORTED_MAX = 1 << 62
"""Of any number in a report: there is room above for all that is given out after it."""

TERM_MAX = 1 << 31
"""Of terms in a report, likewise."""

TESTS_AT_ONCE_MAX = 64
"""Newcomers whose addresses a master tests at once: enough for a crowd that joins together. Each
test makes up to three dials to an address that a holder of the token has chosen."""

TESTS_PER_S = 8
"""The rate after that: nobody can make a master or a member dial unproven addresses more often."""

ASKED_MAX = 256
"""Newcomers that one peer dials because they cannot reach it, and has no link to yet. The list,
with those that have become members, is sent at most once a heartbeat."""

ASKED_UNPROVEN_MAX = 16
"""How many of them may be unproven: nobody has reached them at their declared address. They are
dialled every two seconds, so they cause no more dials than the tests of addresses."""

ASKED_BEATS_MAX = 15
"""Heartbeats for which an elder dials an unproven newcomer in vain: longer than ``link_s``, after
which one that needs this link is refused."""

ELDERS_UNPROVEN_MAX = 16
"""Of the unproven newcomers before it, a newcomer dials the last ones, and those that it needs a
link to. So a process that registers many times at a foreign address causes few dials to it."""

PENDING_MAX = 1024
"""Newcomers that wait to be admitted; their sources share these places. Each newcomer dials all
older ones, so the cost grows with the square of their number."""

SEATED_AT_ONCE_MAX = 128
"""Peers in a run without members up to which every message from one of them makes the master look
for newcomers to admit. With more peers, it looks only at each tick."""

LANES_MAX = 256
"""Lanes of one link; each costs two descriptors and their buffers in the kernel."""

LANES_BETWEEN_MACHINES = 16
"""Lanes of a link for which nobody was told a number: enough where one connection may have a
sixteenth of the line, and no slower where one is enough."""

SHARED_CONNECTIONS_MAX = 256
"""All such links that one peer keeps have about so many lanes together, so with more than 16 links
in use each has fewer. Others decide how many lanes they dial to it."""

CONTROL_MESSAGE_BYTES_MAX = 1 << 20
"""The largest control message is a roster: about 40 bytes a member, so thousands of members fit.
Most types have a far lower limit: what their fields take at most."""

HEARTBEAT_BYTES_MAX = 40 << 10
"""Of a heartbeat, which a busy peer sends in several. It is the largest message of a member: others
wait for some 60 ms until it is decoded."""

NEWCOMER_BYTES_MAX = 4 << 10
"""Of any message of a peer that is registered and not admitted: it has little to say."""

NEWCOMERS_BYTES_PER_S = 2 << 20
"""What all newcomers and strangers together may cost a master, ``MESSAGE_COST_BYTES`` of each
message included: about half a processor. A thousand that join at once send a tenth of it."""

NEWCOMERS_BURST_BYTES = 1 << 20
"""Beyond that, after a pause: a crowd that joins is not slowed down."""

NEWCOMERS_SOURCES_MAX = 1024
"""Sources of newcomers for which a master keeps an account of its own; further ones share one."""

MESSAGE_COST_BYTES = 64
"""What decoding and handling the shortest message costs, in bytes of a long one."""

TURN_BYTES_MAX = 8 << 10
"""Read from one control connection, before all others and the timers have their turn: at most some
700 messages, about 20 ms."""

PROGRESS_BATCH_MAX = 128
"""Operations whose progress one heartbeat reports; more follow in another one."""

FLOWS_MAX = 1024
"""In one heartbeat. Where a mesh whose flows are left out is stuck is not seen."""

LINKS_BATCH_MAX = 64
"""Measured links that one message reports; a newcomer's must fit its limit."""

STANDBYS_MAX = 16
"""Masters' addresses that a master tells."""

BYTE_STRING_MAX = 64
"""Ids, tokens and digests: the longest have 32 bytes."""

UNPROVEN_MAX = 1024
"""Connections at one port before the end of the handshake; more are reset. So many, because a whole
run may come back at once. With fewer descriptors there is room for fewer."""

NEWCOMERS_MAX = 1024
"""At a master: connections that have not said who they are since the handshake. At a peer: links to
peers that we do not know yet, each of one lane. So many may join together."""

LINGERING_MAX = 256
"""Closed connections of one process that wait until the other side has read the last words."""

LINGER_S = 5.0
"""How long a closed connection waits for the other side to read the last messages."""

DESCRIPTORS_WANTED = 16384
"""A process asks the system for so many, if it may: all peers of the largest run and the strangers
at its port, or a few lanes to each of a thousand peers."""

LOG_LINES_MAX = 10
"""Of one kind, about strangers, per interval; the others are counted in one line at its end."""

LOG_INTERVAL_NS = 10 * NS_PER_S
"""So a stranger causes about a line a second at most, however often he comes."""

PEERS_MAX = 3840
"""Registered at one master: a roster of so many, with the longest host names, fits a message."""

REASON_BYTES_MAX = 256
"""Of what members say why they leave, or why a link is down, and of outcomes that quote it: a
master keeps many."""

TEXT_BYTES_MAX = 4096
"""Reasons. Nobody reads more."""

HOST_CHARACTERS_MAX = 253
"""A host name can't be longer (RFC 1035)."""

SEQUENCE_ITEMS_MAX = 65536
"""Items in a list that has no limit of its own; keeps a short message from unfolding into much
memory."""

EARLY_STORE_BYTES_MAX = 256 << 10
"""Per link. Only what small operations send ahead is early; senders keep account of it."""

EAGER_BYTES_MAX = 64 << 10
"""A larger tensor waits until all have asked: there the time of one message more hardly shows, and
a few of them would fill an early store."""

EAGER_SEGMENT_BYTES = 64 << 10
"""The smallest segment, where no other size is fixed: what goes ahead has one per rank."""

HISTORY_EVENTS_MAX = 256
"""Enough to see a whole join or a whole aborted operation when a machine fails."""

NEWS_KEPT_MAX = 16
"""Of what happened to a peer lately, for people: more would hide what came last."""

ROSTERS_KEPT_MAX = 256
"""Rosters that a member who lost its connection can still be told one by one; and those that a
member reports to a restarted master, the newest ones."""

REMOVED_KEPT_MAX = 4096
"""Removed peers that are still told why when they come back."""

JOIN_REASONS_MAX = 3
"""Different reasons that a failed ``connect`` names, the last ones."""

WAITS_NAMED_MAX = 64
"""Operations that are named in one report of a long wait; the others are counted."""

MISSED_KEPT_MAX = 16
"""Mismatches per view and tag that a late caller is still told."""

OPERATIONS_OPEN_MAX = 16384
"""Undecided operations that one member has begun: more is a mistake, or malice."""

TAGS_PER_VIEW_MAX = 65536
"""Different tags used in one view; beyond, the next ``update_topology`` begins a new view, so that
the numbers of tags that are never used again don't pile up."""

OWED_MAX = 65536
"""Outcomes and answers that a member has not acknowledged; it loses its connection beyond."""

RTT_NS_MAX = 60 * NS_PER_S
"""Of a link that somebody reports: more is a mistake, or malice, and counts as this."""

BYTES_PER_S_MAX = 10**12
"""Likewise: ten times the fastest network there is."""

SECONDS_MAX = 10 * 365 * 24 * 3600
"""Of any deadline: ten years, for those who want none."""

ACKNOWLEDGED_BATCH_MAX = 64
"""Outcomes acknowledged in one message; more do not wait for the next heartbeat."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of one process, in seconds. ``docs/protocol.md`` argues the defaults."""

    heartbeat_s: float = 1.0
    """Both ways on the control connection: cheap, and ten of them fit into the deadline."""
    tick_s: float = 0.25
    """How often a machine looks at its deadlines; a tick this late or more shifts them all."""
    deadline_s: float = 10.0
    """Silence after which a peer that others wait for is removed."""
    resume_s: float = 2.0
    """Time to resume a lost control connection while all lanes are fine."""
    lane_stall_s: float = 10.0
    """A lane that owes data of a running operation and delivers nothing is replaced."""
    progress_s: float = 30.0
    """No progress of a started operation at any member: longer than two tries of a stalled lane."""
    link_s: float = 10.0
    """Time a newcomer has to be linked to its neighbours before it is refused."""
    dial_s: float = 5.0
    """One attempt to connect; well over three round trips with a lost packet in each."""
    redial_min_s: float = 0.02
    redial_max_s: float = 0.5
    """Back-off between attempts to reach somebody who should be there."""
    connect_retry_s: float = 1.0
    """Between the attempts of ``connect`` to find a master."""
    hold_s: float = 30.0
    """How long newcomers may keep the members waiting in a synchronization; they join again later,
    and keep what they have."""
    lockstep_s: float = 1.0
    """Members that wait for different things for so long, all callers blocked, are told so."""
    waiting_report_s: float = 5.0
    """A call that waits so long is told, and logs, whom it waits for."""
    recovery_s: float = 5.0
    """How long a restarted master waits for the members that have not come back yet: ten times the
    longest pause between their attempts."""
    master_lost_s: float = 60.0
    """A master that does not come back within this time is lost."""

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
