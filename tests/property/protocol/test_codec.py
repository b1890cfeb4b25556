"""What crosses the wire: everything valid survives any split, nothing invalid does harm."""

from __future__ import annotations

import enum
import functools
import math
import random
import struct
import tracemalloc
import types
import typing
import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pccl.protocol import messages as msg
from pccl.protocol.checksum import DamagedData, seal
from pccl.protocol.codec import PREFIX_BYTES, StreamDecoder, decode, encode, frame
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import (
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    FrameHeader,
    FrameKind,
    decode_header,
    encode_header,
)
from pccl.protocol.guards.early_store import EarlyStore
from pccl.protocol.limits import (
    CONTROL_MESSAGE_BYTES_MAX,
    PEERS_MAX,
    REASON_BYTES_MAX,
    SEQUENCE_ITEMS_MAX,
    TEXT_BYTES_MAX,
)
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import Member, OperationId, PeerId, RemovalCause, RoundId, RoundKind

MESSAGE_TYPES: list[type[Any]] = [
    *typing.get_args(msg.PeerMessage),
    *typing.get_args(msg.MasterMessage),
]

# -- strategies built from the dataclasses' hints ----------------------------------------------


def integers_below(bound: int) -> SearchStrategy[int]:
    edges = st.sampled_from([0, 1, bound - 1])
    return edges | st.integers(0, bound - 1)


def values_of(hint: Any) -> SearchStrategy[Any]:
    return _values_of(hint)


@functools.cache
def _values_of(hint: Any) -> SearchStrategy[Any]:
    if isinstance(hint, typing.NewType):
        return values_of(hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        base, annotation = typing.get_args(hint)
        if base is float:
            return st.floats(annotation.smallest, annotation.largest)
        if base is int:
            return integers_below(annotation.bound)
        if base is bytes:
            return st.binary(max_size=min(40, annotation.count))
        assert annotation.count >= 3
        return values_of(base)
    if origin is tuple:
        item, _ = typing.get_args(hint)
        return st.lists(values_of(item), max_size=3).map(tuple)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(values_of(choice) for choice in typing.get_args(hint)))
    if hint is type(None):
        return st.none()
    if hint is int:
        return integers_below(1 << 64)
    if hint is bool:
        return st.booleans()
    if hint is bytes:
        return st.binary(max_size=40)
    if hint is str:
        printable = st.characters(codec="utf-8", exclude_categories=["C", "Z"])
        return st.text(printable | st.just(" "), max_size=16)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    assert is_dataclass(hint)
    return instances_of(typing.cast("type[Any]", hint))


def instances_of(kind: type[Any]) -> SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]
    return st.tuples(*(values_of(hints[name]) for name in names)).map(lambda v: kind(*v))


MESSAGES = st.one_of(*(values_of(kind) for kind in MESSAGE_TYPES))


def pack(code: int, *parts: object) -> tuple[int, bytes]:
    packed: bytes = msgpack.packb(list(parts))
    return code, packed


def taken(wire: bytes) -> tuple[int, bytes]:
    """Code and fields of one encoded message."""
    return wire[3], wire[PREFIX_BYTES:]


# -- control messages --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_type_round_trips(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    wire = encode(message)
    assert struct.unpack("<I", wire[:3] + b"\0") == (len(wire) - PREFIX_BYTES,)
    again = decode(*taken(wire))
    assert type(again) is kind
    assert again == message


def test_a_message_on_the_wire_byte_by_byte() -> None:
    message = msg.RoundRequest(RoundId(RoundKind.PEERS_PENDING, 300))
    body = bytes.fromhex("93 92 02 cd012c c0 c2")
    prefix = bytes.fromhex("08000005") + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    assert encode(message) == prefix + struct.pack("<I", zlib.crc32(prefix)) + body
    refused = msg.Refused(RemovalCause.SILENT, "é")
    assert taken(encode(refused)) == (0x43, bytes.fromhex("94 04 a2 c3a9 00 00"))


@settings(max_examples=100)
@given(st.lists(MESSAGES, max_size=5), st.data())
def test_any_split_of_the_bytes_gives_the_same_messages(
    messages: list[msg.Message], data: st.DataObject
) -> None:
    wire = b"".join(encode(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(wire)), max_size=12).map(sorted))
    decoder, found = StreamDecoder(), list[msg.Message]()
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += decoder.feed(memoryview(wire)[start:end])
    assert found == messages


CODES = st.sampled_from([*range(1, 32), *range(64, 96)])


def feed_expecting_only_protocol_errors(data: bytes, step: int) -> list[msg.Message]:
    decoder, found = StreamDecoder(), list[msg.Message]()
    try:
        for start in range(0, len(data), step):
            found += decoder.feed(data[start : start + step])
    except RemoteProtocolError as error:
        refusal = error
    else:
        return found
    assert refusal.reason
    assert len(refusal.reason) < 2000
    return found


@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_bit_flips_and_truncation_do_no_harm(message: msg.Message, data: st.DataObject) -> None:
    code, fields = taken(encode(message))
    body = bytearray(fields)
    for position in data.draw(st.lists(st.integers(0, 8 * len(body) - 1), max_size=4)):
        body[position // 8] ^= 1 << position % 8
    body = body[: data.draw(st.integers(0, len(body)))]
    for decoded in feed_expecting_only_protocol_errors(frame(code, bytes(body)), 7):
        assert decode(*taken(encode(decoded))) == decoded


@settings(max_examples=100)
@given(MESSAGES, st.data())
def test_truncated_bodies_are_never_a_message(message: msg.Message, data: st.DataObject) -> None:
    code, body = taken(encode(message))
    with pytest.raises(RemoteProtocolError):
        decode(code, body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(RemoteProtocolError):
        decode(code, body + data.draw(st.binary(min_size=1, max_size=3)))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.binary(max_size=4) | st.text(st.characters(codec="utf-8"), max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=1), inner,
                                                                max_size=2),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300)
@given(CODES, st.lists(PLAIN, max_size=5))
def test_wrong_types_and_field_counts_do_no_harm(code: int, parts: list[Any]) -> None:
    try:
        message = decode(*pack(code, *parts))
    except RemoteProtocolError:
        return
    assert decode(*taken(encode(message))) == message


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_a_missing_or_an_extra_field_is_refused(kind: type[Any]) -> None:
    sample = SAMPLES[kind]
    code, body = taken(encode(sample))
    parts: list[Any] = msgpack.unpackb(body)
    assert decode(*pack(code, *parts)) == sample
    for wrong in ([*parts, None], [*parts, 0], *([parts[:-1]] if parts else [])):
        with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} has"):
            decode(*pack(code, *wrong))


OPERATION = OperationId(1, 2, 3, 4, 5)
SAMPLES: dict[type[Any], msg.Message] = {}


def _fill_samples() -> None:
    members = [[1, "h", 9, 5, "alice", b"key", ["10.0.0.7"]]]
    algorithms = [[[4096, 2]], 3, 1, [[65000, 536], [0, 1]]]
    roster = [7, 2, 1, members, [1], 1, 1, 1, 1, 2, algorithms, 9, [4, 9]]
    op = [1, 2, 3, 4, 5]
    registration = [0, "h", 9, 2, 1, True, 5, "alice", ["10.0.0.7"]]
    answer = [[1, 0], 7, True, "", 4]
    elected = [7, b"layout", b"content", [1], [2], [3], b"extra", [1]]
    outcome = [op, None, "", [1], 7, 3, ["w", 2, "where"], [0.0, 2.5], elected, b"d" * 32]
    quorum = [3, 0.5, 250]
    change = [9, 2, [[1, 5, 8, b"6"]]]
    lineage = [b"run", op]
    delta = [b"before", b"after", [b"layout", b"content"], 17]
    version = [7, [b"layout", b"content"], 1 << 40, lineage, [delta]]
    later = ("", 4, 3, 250, 2.5, [["cosine", 0.25]], 1, b"fingerprint", 125_000)
    bodies: dict[type[Any], list[Any]] = {
        msg.Register: [1, *registration],
        msg.Resume: [2, 1, 0, b"m", ["10.0.0.7"]],
        msg.Goodbye: [3],
        msg.Heartbeat: [
            4,
            [[op, 1, 2, 1 << 40, [[3, 1, 2]]]],
            [op],
            [[1, 0]],
            True,
            7,
            2,
            5,
            6,
            -0.5,
            [["cosine", 0.25]],
            8,
        ],
        msg.RoundRequest: [5, [1, 0], quorum, False],
        msg.OperationRequest: [
            6,
            op,
            [10, 1, 8, 2, 1, [1, 96, True], 3, True, True, [2, 1, 8.0, 4], True, quorum],
            2,
            2.5,
            3.5,
            b"\x05",
            [[1, 0, 3], [1, 2, 0]],
            [[3, 1], 5, 1],
        ],
        msg.SyncRequest: [
            13,
            op,
            [*(0, 2, 1, 7, lineage, True, False), b"layout", b"content", b"extra"],
            quorum,
        ],
        msg.Damaged: [24],
        msg.Prefetched: [15],
        msg.StatesCompared: [14, op, ["w", None, "where"]],
        msg.SyncStarted: [80, op, elected],
        msg.CompareStates: [81, op, 3],
        msg.OperationDone: [7, op, b"d"],
        msg.Withdraw: [8, op, "why", [[2, 1], 5, 0]],
        msg.OutcomeQuery: [9, op],
        msg.LinkReport: [10, 1, False, "down", None, 0],
        msg.LinksMeasured: [22, [[1, [250000, 1 << 30]], [2, [0, 0]]]],
        msg.BlockedReply: [11, 3, True],
        msg.StatusRequest: [21],
        msg.Return: [16, 1, b"run", 1, registration, 7, [[1, 3]], b"m", 6, [7, lineage]],
        msg.KnownRoster: [17, roster, b"m"],
        msg.KnownOutcome: [18, outcome, False, [7, lineage]],
        msg.KnownAnswer: [19, answer, False],
        msg.StoreRequest: [28, 4, 4, [b"key", b"other"], b"desired", b"expected", [4, 6]],
        msg.KnownEntry: [29, b"key", b"7", change],
        msg.StoreAnswer: [93, 4, 3, False, b"7", change],
        msg.Reported: [20],
        msg.AddressQuery: [31, "h", 9, b"pad"],
        msg.AddressIs: [95, "10.0.0.7", True, "connection refused", 10**15, 41201, True, b""],
        msg.AnnounceVersions: [32, [version]],
        msg.Subscribe: [33, 2, 9, "h", ["10.0.0.7"], "alice"],
        msg.ReaderLives: [34],
        msg.Subscribed: [96, 7, 1, b"run", [b"key", b"signature"]],
        msg.CurrentVersion: [97, version, members, members, 2, 5],
        msg.EvidenceRequest: [26, 1, 2],
        msg.EvidenceReply: [27, 7, b"data", ""],
        msg.EvidenceQuery: [88, 7, 3],
        msg.EvidenceReport: [89, b"", "no", True],
        msg.RunQuery: [23, b"run", 9],
        msg.RunIs: [83, b"run", 7, True, 9, [[1, b"key"]]],
        msg.Registered: [64, 1, 1, b"run", b"m", [["h", 9]], [b"key", b"signature"]],
        msg.Holdings: [12, op, 2, True],
        msg.LinkPlan: [65, [[1, "h", 9, 0, "", b"key", ["10.0.0.7"]]], [2]],
        msg.DialNewcomers: [87, [[1, "h", 9, 0, "", b"key", ["10.0.0.7"]]]],
        msg.Meet: [
            90,
            [1, "h", 9, 0, "", b"key", ["10.0.0.7"]],
            [0, "", 0, 0, "", b"", ["10.0.0.7"]],
        ],
        msg.ProbeAddress: [85, [1, "h", 9, 0, "", b"key", ["10.0.0.7"]], "10.0.0.7"],
        msg.Undialable: [86, "at h:9 (the master: connection refused)"],
        msg.AddressProbed: [25, 1, "connection refused"],
        msg.Resumed: [66, 2, b"m", [["h", 9]], [b"key", b"signature"]],
        msg.Refused: [67, None, "why", 5, 9],
        msg.Admitted: [68, roster, [[1, 0]], 7, [8, lineage]],
        msg.RosterChanged: [69, roster, [[3, 4, "silent"]]],
        msg.RoundClosed: [70, *answer],
        msg.RoundAwaits: [92, [1, 0], False],
        msg.OperationNarrowed: [91, op, b"\x05"],
        msg.OperationStarted: [71, op, [0.0, 2.5], [[0, None, None, True], [1, 3.5, 2.0, False]]],
        msg.OperationEnded: [72, *outcome],
        msg.MasterHeartbeat: [73, 9, 5, 6, 7, 8],
        msg.RoundWaits: [74, [1, 0], 5, "peer 2"],
        msg.OperationWaits: [75, op, 5, "peer 2", [op], 2],
        msg.BlockedQuery: [76, 3],
        msg.AdmissionWaits: [77, 5, "company"],
        StatusReport: [
            *(82, b"run", 1, 60000, 7),
            *(1, [[1, "alice", 0, 0, "h", 9, True, 5, None, "a barrier", *later]]),
            *(1, [[2, "bob", 0, "h", 9, False, 5, 6, "company", 2, b"fingerprint"]]),
            *(1, [[0, 7, 1, [6, 7], algorithms]]),
            [[[1, 0], 5, 1, [1], 1]],
            *(1, [[op, "a barrier", True, 5, 4, 2, [1], 1, 0, 10]]),
            *(1, [["a barrier", 0, 5, 250, 2, 100, 4096, None]]),
            *(1, [[1, 2, 250, 1 << 30, 3, 4, True, None]]),
            *(1, [[3, "carol", 0, 4, "silent", 10]]),
            "members",
        ],
        msg.HoldingsQuery: [78, op, [3, 9]],
        msg.Repair: [79, op, [3]],
        msg.Proposed: [84, 5, outcome, answer, [7, lineage]],
    }
    for kind, body in bodies.items():
        SAMPLES[kind] = decode(*pack(*body))
        assert type(SAMPLES[kind]) is kind


_fill_samples()


GUARDED = [10, 1, 8, 1, 0, [0, 0, False], 0, False, True, False]


def asked(
    descriptor: list[Any],
    weight: object = 0.0,
    norm: object = 0.0,
    guard: object = None,
    quorum: object = None,
    blocks: object = None,
    among: object = None,
) -> tuple[int, bytes]:
    """A request of an operation."""
    descriptor = [*descriptor[:-1], guard, descriptor[-1], quorum]
    return pack(6, [1, 2, 3, 4, 5], descriptor, 0, weight, norm, b"", blocks, among)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (pack(1, -1, "h", 9, 1, 1, False, 0, "", []), "not an integer from 0 to 4294967295"),
        (pack(1, 1 << 32, "h", 9, 1, 1, False, 0, "", []), "not an integer from 0 to 4294967295"),
        (pack(1, 0, "h", 1 << 16, 1, 1, False, 0, "", []), "not an integer from 0 to 65535"),
        (pack(1, True, "h", 9, 1, 1, False, 0, "", []), "not an integer"),
        (pack(1, 1.0, "h", 9, 1, 1, False, 0, "", []), "not an integer"),
        (pack(1, 0, b"h", 9, 1, 1, False, 0, "", []), "not str"),
        (pack(1, 0, None, 9, 1, 1, False, 0, "", []), "not str"),
        (pack(2, 1, 0, "master", []), "not bytes"),
        (pack(2, -1, 0, b"", []), "not an integer"),
        (pack(65, [[1, "h", 9, 0, "", "key", ["h"]]], []), "not bytes"),
        (pack(65, [[1, "h", 9, 0, "", bytes(33), ["h"]]], []), "byte string has 33 bytes, over 32"),
        (pack(10, 1, 1, "", None, 0), "not bool"),
        (pack(10, 1, True, "", None, 5), "5 is not a LinkPath"),
        (pack(5, [4, 0], None, False), "not a RoundKind"),
        (pack(5, [True, 0], None, False), "not a RoundKind"),
        (pack(5, 3, None, False), "not a list"),
        (asked([99, 0, 8, 1, 0, [0, 0, False], 0, False, False, False]), "not a DataType"),
        (asked([10, 0, 8, 1, 0, [99, 0, False], 0, False, False, False]), "not a WireFormat"),
        (asked([10, 0, 8, 1, 0, [1, 65537, False], 0, False, False, False]), "0 to 65536"),
        (asked([10, 0, 8, 1, 0, [1, 96, 1], 0, False, False, False]), "not bool"),
        (asked([10, 0, 8, 1, 0, 0, 0, False, False, False]), "not a list"),
        (asked([10, 1, 8, 1, 0, [0, 0, False], 0, False, True, False], 1), "1 is not a float"),
        (asked([10, 1, 8, 1, 0, [0, 0, False], 0, False, True, False], -0.1), "from 0 to 1e\\+300"),
        (asked([10, 1, 8, 1, 0, [0, 0, False], 0, False, True, False], 1.1e300), "not a float"),
        (
            asked([10, 1, 8, 1, 0, [0, 0, False], 0, False, True, False], math.nan),
            "nan is not a float",
        ),
        (asked(GUARDED, 1.0, math.inf, [2, 1, 8.0, 8]), "inf is not a float"),
        (asked(GUARDED, 1.0, math.nan, [2, 1, 8.0, 8]), "nan is not a float"),
        (asked(GUARDED, 1.0, -1.0, [2, 1, 8.0, 8]), "-1.0 is not a float"),
        (asked(GUARDED, 1.0, None, [3, 1, 8.0, 8]), "3 is not a GuardAction"),
        (asked(GUARDED, 1.0, None, [2, 1, 0.5, 8]), r"float from 1 to 1e\+06"),
        (asked(GUARDED, 1.0, None, [2, 1, 8.0, 65]), "integer from 0 to 64"),
        (asked(GUARDED, 1.0, None, [2, 1, 8.0]), "ContributionGuard has 4 fields, not 3"),
        (asked(GUARDED, 1.0, quorum=[1 << 16, 0.5, None]), "0 to 65535"),
        (asked(GUARDED, 1.0, quorum=[0, 1.5, None]), "1.5 is not a float from 0 to 1"),
        (asked(GUARDED, 1.0, quorum=[0, 0.5, 3600001]), "0 to 3600000"),
        (asked(GUARDED, 1.0, blocks=[[1]]), "BlockLengths has 2 fields, not 1"),
        (asked(GUARDED, 1.0, blocks=[[1, 1 << 63], []]), r"0 to 9223372036854775807"),
        (asked(GUARDED, 1.0, blocks=[[0] * 1025, []]), "1024"),
        (asked(GUARDED, 1.0, among=[[1, 2], 5]), "Subset has 3 fields, not 2"),
        (asked(GUARDED, 1.0, among=[[1, 2], 1 << 63, 0]), r"0 to 9223372036854775807"),
        (asked(GUARDED, 1.0, among=[[1] * 2801, 5, 0]), "list has 2801 items, over 2800"),
        (pack(91, [1, 2, 3, 4, 5], b"x" * 351), "byte string has 351 bytes, over 350"),
        (pack(71, [1, 2, 3, 4, 5], [1.0, math.inf], []), "inf is not a float"),
        (pack(71, [1, 2, 3, 4, 5], 1.0, []), "not a list"),
        (pack(71, [1, 2, 3, 4, 5], [1.0], [[1 << 16, None, None, True]]), "0 to 65535"),
        (pack(71, [1, 2, 3, 4, 5], [1.0], [[0, -1.0, None, True]]), "-1.0 is not a float"),
        (pack(67, 99, "why", 0, 0), "not a RemovalCause"),
        (pack(65, "members", []), "not a list"),
        (pack(65, [[1, "h"]], []), "Member has 7 fields, not 2"),
        (pack(67, None, "x" * (TEXT_BYTES_MAX + 1), 0, 0), "text has 4097 bytes, over 4096"),
        (pack(67, None, "é" * 2049, 0, 0), "text has 4098 bytes, over 4096"),
        (pack(7, [1, 2, 3, 4, 5], b"x" * 65), "byte string has 65 bytes, over 64"),
        (pack(22, [[1, [1, 1]]] * 65), "list has 65 items, over 64"),
        (pack(4, [], [], [[1, 0]] * (SEQUENCE_ITEMS_MAX + 1), False, 0), "not valid MessagePack"),
        (pack(4, [], [], [[1, 0]] * 65, False, 0, 0, 0, 0, 0, [], 0), "list has 65 items, over"),
        (pack(4, [], [], [], False, 0, 0, 0, 0, -1.1e300, [], 0), r"from -1e\+300 to 1e\+300"),
        (pack(4, [], [], [], False, 0, 0, 0, 0, math.nan, [], 0), "nan is not a float"),
        (
            pack(4, [], [], [], *(False, 0, 0, 0, 0, None, [["a", 1.0]] * 9, 0)),
            "list has 9 items, over 8",
        ),
        (
            pack(4, [], [], [], *(False, 0, 0, 0, 0, None, [["a", math.nan]], 0)),
            "nan is not a float",
        ),
        (
            pack(4, [], [], [], *(False, 0, 0, 0, 0, None, [["a" * 65, 1.0]], 0)),
            "text has 65 bytes",
        ),
        (pack(0), "unknown message code 0"),
        (pack(63), "unknown message code 63"),
        (pack(255), "unknown message code 255"),
        ((5, b""), "not valid MessagePack"),
        ((5, b"\x01"), "malformed RoundRequest: 1 is not a list"),
        ((5, b"\xc1"), "not valid MessagePack"),
        ((5, b"\x80"), "a dict is not a list"),
        ((3, b"\x91\xd6\xff\x00\x00\x00\x01"), "not valid MessagePack"),  # a timestamp
        ((3, b"\x91\xd4\x01\x01"), "not valid MessagePack"),  # an extension
        ((10, b"\x91\x81\x01\x02"), "not valid MessagePack"),  # a map
        ((1, b"\x95\x00\xa2\xff\xfe\x09\x01\x01"), "not valid MessagePack"),  # not UTF-8
    ],
)
def test_each_breach_is_named(body: tuple[int, bytes], says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        decode(*body)


@pytest.mark.parametrize("depth", [10, 500, 980, 1000, 1019, 1024, 5000, 500_000])
def test_deep_nesting_does_no_harm(depth: int) -> None:
    for code, opening in ((5, b""), (1, b"\x94"), (5, b"\x91"), (68, b"\x91")):
        with pytest.raises(RemoteProtocolError):
            decode(code, opening + b"\x91" * depth + b"\x01" + b"\xa0\x01")


def test_a_short_message_does_not_unfold_into_much_memory() -> None:
    bodies = [
        b"\xdc\xff\xff" * 1000,
        b"\xdc\x07\xff" * 1000,
        b"\xdd\x00\x00\x0f\xff" * 1000,
        b"\xdd\x00\x01\x00\x00" * 1000 + b"\xc0" * 1000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ]
    tracemalloc.start()
    try:
        for body in bodies:
            tracemalloc.reset_peak()
            with pytest.raises(RemoteProtocolError):
                decode(65, body)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_an_oversized_length_is_refused_before_anything_is_kept() -> None:
    decoder = StreamDecoder()
    with pytest.raises(RemoteProtocolError, match="1048577 bytes; at most 1048576"):
        list(decoder.feed(seal(struct.pack("<IQ", 69 << 24 | CONTROL_MESSAGE_BYTES_MAX + 1, 0))))


def test_memory_is_bounded_by_one_message() -> None:
    chunk = bytes(16 << 10)
    tracemalloc.start()
    try:
        decoder = StreamDecoder()
        roster = seal(struct.pack("<IQ", 69 << 24 | CONTROL_MESSAGE_BYTES_MAX, 0))
        assert list(decoder.feed(roster)) == []
        for _ in range(CONTROL_MESSAGE_BYTES_MAX // len(chunk) - 1):
            assert list(decoder.feed(chunk)) == []
        with pytest.raises(RemoteProtocolError):
            list(decoder.feed(chunk))
        assert tracemalloc.get_traced_memory()[1] < 6 * CONTROL_MESSAGE_BYTES_MAX
    finally:
        tracemalloc.stop()


@settings(max_examples=50)
@given(st.text(max_size=20), st.integers(0, 3 * REASON_BYTES_MAX))
def test_long_or_odd_text_is_cut_and_never_refused(text: str, length: int) -> None:
    reason = (text or "x") * (length // max(len(text), 1) + 1)
    message = decode(*taken(encode(msg.LinkReport(PeerId(1), False, reason))))
    assert isinstance(message, msg.LinkReport)
    assert len(message.reason.encode()) <= REASON_BYTES_MAX
    kept = reason.encode("utf-8", "replace").decode()
    if not kept.isprintable():
        assert message.reason.isprintable()
        return
    assert kept.startswith(message.reason)
    assert (
        len(kept.encode()) - len(message.reason.encode()) < 4
        or len(message.reason.encode()) > REASON_BYTES_MAX - 4
    )


def texts_in(hint: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where texts are in the plain lists of a type: indexes of fields, 0 into tuples."""
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if hint is str:
        yield path
    elif typing.get_origin(hint) is tuple:
        yield from texts_in(typing.get_args(hint)[0], (*path, 0))
    elif typing.get_origin(hint) in (types.UnionType, typing.Union):
        yield from texts_in(typing.get_args(hint)[0], path)
    elif is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        for index, one in enumerate(fields(hint)):
            yield from texts_in(hints[one.name], (*path, index))


TEXTS = [(kind, path) for kind in MESSAGE_TYPES for path in texts_in(kind)]
NASTY = "a\r\nb\x1b[2J\x9b\u202ec\u2028\u2066d\ud7ff\0e"


@pytest.mark.parametrize(("kind", "path"), TEXTS, ids=lambda one: getattr(one, "__name__", None))
def test_no_text_of_others_breaks_a_line(kind: type[Any], path: tuple[int, ...]) -> None:
    code, body = taken(encode(SAMPLES[kind]))
    parts: list[Any] = msgpack.unpackb(body)
    inside: Any = parts
    for index in path[:-1]:
        inside = inside[index]
    inside[path[-1]] = NASTY
    again: list[Any] = msgpack.unpackb(taken(encode(decode(*pack(code, *parts))))[1])
    found: Any = again
    for index in path:
        found = found[index]
    assert found == "a??b?[2J??c??d??e".replace("?", "\N{REPLACEMENT CHARACTER}")


def test_a_large_roster_fits() -> None:
    members = tuple(Member(PeerId(n), "2001:db8::ffff:ffff:ffff", 65535) for n in range(PEERS_MAX))
    plan = msg.LinkPlan(members)
    assert decode(*taken(encode(plan))) == plan


# -- frame headers ------------------------------------------------------------------

U32 = integers_below(1 << 32)
U64 = integers_below(1 << 64)
BARE = (
    FrameKind.QUERY,
    FrameKind.PING,
    FrameKind.PONG,
    FrameKind.MEET,
    FrameKind.PULL_READY,
    FrameKind.PULL_FAILED,
    FrameKind.MAP_ASK,
    FrameKind.LAYOUT_ASK,
    FrameKind.WATCH,
)
WIRE_KINDS = {
    **{"QUERY": 2, "PING": 4, "PONG": 5, "PULL_READY": 9, "PULL_FAILED": 10},
    "MEET": 11,
    **{"MAP_ASK": 16, "LAYOUT_ASK": 22, "WATCH": 24},
}
HEADERS = st.sampled_from(FrameKind).flatmap(
    lambda kind: st.builds(
        FrameHeader,
        st.just(kind),
        st.builds(OperationId, U32, U32, U32, U64, U32),
        integers_below(1 << 16),
        U64,
        st.just(0) if kind in BARE else integers_below(PAYLOAD_BYTES_MAX + 1),
    )
)


@settings(max_examples=200)
@given(HEADERS)
def test_frame_headers_round_trip(header: FrameHeader) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES == 56
    for form in (data, bytearray(data), memoryview(data)):
        assert decode_header(form) == header


def test_a_header_on_the_wire() -> None:
    header = FrameHeader(FrameKind.DATA, OperationId(1, 2, 3, 4, 5), 6, 7, 8)
    expected = bytes.fromhex(
        "01 00 0600 08000000 01000000 02000000 03000000 05000000"
        "0400000000000000 0700000000000000 0a00000000000000 00000000"
    )
    assert encode_header(header, 10) == expected + struct.pack("<I", zlib.crc32(expected))
    assert decode_header(encode_header(header, 10)).check == 10


@settings(max_examples=300)
@given(HEADERS, st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_flipped_bit_in_a_header_is_found(header: FrameHeader, bit: int) -> None:
    data = bytearray(encode_header(header, 1 << 63))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedData, match="header of a frame was damaged"):
        decode_header(data)


@settings(max_examples=100)
@given(MESSAGES, st.lists(MESSAGES, max_size=2), st.integers(1, 100), st.data())
def test_any_flipped_bit_in_a_control_message_is_found(
    message: msg.Message, behind: list[msg.Message], step: int, data: st.DataObject
) -> None:
    """The damaged message, and what comes behind it, is never returned."""
    wire = bytearray(encode(message))
    bit = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << bit % 8
    wire += b"".join(map(encode, behind))
    decoder, found = StreamDecoder(), list[msg.Message]()

    def feed() -> None:
        for start in range(0, len(wire), step):
            found.extend(decoder.feed(wire[start : start + step]))

    with pytest.raises(DamagedData):
        feed()
    assert found == []


def test_a_damaged_length_is_not_waited_for() -> None:
    wire = bytearray(encode(msg.Heartbeat()))
    wire[2] ^= 8  # half a MiB
    with pytest.raises(DamagedData, match="prefix"):
        list(StreamDecoder().feed(wire[:PREFIX_BYTES]))


@pytest.mark.parametrize("kind", [0, 12, 255])
def test_unknown_kinds_are_refused(kind: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"kind={kind}"):
        decode_header(seal(bytes([kind]) + bytes(51)))


@pytest.mark.parametrize("kind", BARE)
def test_what_carries_nothing_says_so(kind: FrameKind) -> None:
    header = FrameHeader(kind, OperationId(1, 2, 3, 4, 5), 0, 7, 0)
    data = bytearray(encode_header(header))
    assert data[0] == WIRE_KINDS[kind.name]
    assert decode_header(data) == header
    data[4] = 1
    with pytest.raises(RemoteProtocolError, match=f"a {kind.name} carries no payload"):
        decode_header(seal(bytes(data[:52])))


def test_a_frame_beyond_the_limit_is_refused() -> None:
    data = bytearray(52)
    data[0] = FrameKind.DATA
    data[4:8] = struct.pack("<I", PAYLOAD_BYTES_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="16777217"):
        decode_header(seal(bytes(data)))


# -- the early store ---------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(HEADER_BYTES, 2000))
def test_the_early_store_is_bounded_and_loses_nothing(seed: int, bytes_max: int) -> None:
    """Against a twin that keeps plain lists: order, content and the exact bound."""
    rng = random.Random(seed)
    store = EarlyStore(bytes_max)
    operations = [OperationId(1, 0, 1, tag, 0) for tag in range(4)]
    reading: list[tuple[FrameHeader, bytearray]] = []
    kept: list[tuple[FrameHeader, bytearray]] = []
    for number in range(60):
        held = sum(HEADER_BYTES + len(payload) for _, payload in reading + kept)
        assert held <= bytes_max
        match rng.choice(["reserve", "reserve", "put", "put", "release", "take", "discard"]):
            case "reserve":
                length = rng.choice([0, 1, rng.randrange(bytes_max), bytes_max - HEADER_BYTES])
                operation = rng.choice(operations)
                header = FrameHeader(FrameKind.DATA, operation, 0, number, length)
                if held + HEADER_BYTES + length > bytes_max:
                    with pytest.raises(RemoteProtocolError, match=f"more than {bytes_max}"):
                        store.reserve(header)
                else:
                    memory = store.reserve(header)
                    assert len(memory) == length
                    memory[:] = rng.randbytes(length)
                    reading.append((header, memory))
            case "put" if reading:
                entry = reading.pop(rng.randrange(len(reading)))
                store.put(*entry)
                kept.append(entry)
            case "release" if reading:
                store.release(reading.pop(rng.randrange(len(reading)))[0])
            case "take":
                operation = rng.choice(operations)
                expected = [entry for entry in kept if entry[0].operation == operation]
                assert store.take(operation) == expected
                kept = [entry for entry in kept if entry[0].operation != operation]
            case "discard":
                operation = rng.choice(operations)
                store.discard(operation)
                kept = [entry for entry in kept if entry[0].operation != operation]
            case _:
                pass
        assert set(store.operations()) == {header.operation for header, _ in kept}
    for header, _ in reading:
        store.release(header)
    for operation in store.operations():
        store.discard(operation)
    whole = FrameHeader(FrameKind.DATA, operations[0], 0, 0, bytes_max - HEADER_BYTES)
    assert len(store.reserve(whole)) == bytes_max - HEADER_BYTES  # so the count is back at zero
    with pytest.raises(RemoteProtocolError):
        store.reserve(FrameHeader(FrameKind.DATA, operations[0], 0, 0, 0))
