"""Every decoder of bytes and text from outside, in one table, and what holds for all of them.

Any bytes, and valid ones that were flipped, cut, prolonged, spliced or overwritten with huge
lengths, are decoded or refused with the documented error; nothing is allocated for bytes that are
only announced; what is accepted means one thing; and a stream may arrive byte by byte. Where
checksums stand in front, each case is tried with and without making them fit, as whoever changes
bytes on purpose does.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import ml_dtypes
import msgpack
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._api.objects import decode_object
from pccl.addresses import parse_address, parse_advertised, parse_masters, parse_proxies
from pccl.checkpoint import Reader
from pccl.cli.bench.statistics import Timed
from pccl.cli.processes import reports
from pccl.cli.runs.run_file import Unusable, parse_run
from pccl.collectives import bitmap
from pccl.collectives.quantization import make_codec
from pccl.collectives.reductions import Scratch
from pccl.config import read_token_file
from pccl.protocol import codec
from pccl.protocol.checksum import seal, short_check
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import LinkError, LocalProtocolError, RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind, decode_header, encode_header
from pccl.protocol.handshake.exchange import PROOF_BYTES, Handshake
from pccl.protocol.handshake.opening import OPENING_BYTES, Channel, Opening
from pccl.protocol.handshake.proxy_header import FIXED_BYTES, ProxyHeader
from pccl.protocol.handshake.records import LENGTH_BYTES, plain_length
from pccl.protocol.handshake.token import RunToken, parse_token
from pccl.protocol.port_mapping import nat_pmp
from pccl.protocol.port_mapping.pcp import PortRequest
from pccl.protocol.shared_state import DIGEST_BYTES, Lineage
from pccl.protocol.types import OperationId, PeerId, Quantization, WireFormat
from pccl.runtime import keys_file
from pccl.runtime.control.greeting import anyone
from pccl.runtime.master_store import DirectoryStore
from pccl.runtime.state.frames import numbers_of, pack_numbers
from pccl.runtime.state.results import ResultNews
from pccl.state.checkpoint_header import Checkpoint, CheckpointTensor, checkpoint_of, header_of
from pccl.state.delta import apply_delta
from pccl.state.layout import Entry, StateLayout
from pccl.state.versions import name_and_shape
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.timeline import FaultKind, Timeline, TimelineError, TimelineFault
from pccl.telemetry.events import from_json
from pccl.telemetry.evidence import unpack_evidence
from pccl.transports.announcement import (
    decode_announcement,
    decode_ask,
    decode_at,
    encode_announcement,
    encode_ask,
    encode_at,
)
from pccl.transports.base import Address
from pccl.transports.relay import INTRODUCTION_BYTES, decode_introduction, introduction
from tests.property import test_hostile_frames
from tests.property.protocol import test_codec
from tests.support.paths import ROOT
from tests.support.proxy_headers import LOCAL, UNIX, header, proxied
from tests.support.secret_files import keep
from tests.support.secrets import secrets_of

T = TypeVar("T")

EXAMPLES = 300
SEEDS = st.integers(0, (1 << 32) - 1)
ROOMS = ("pccl", "transports", "stress")
MEMORY_MAX = 1 << 20
"""Of what any short input may cost: thousands of times what it is, and no declared length."""


def as_it_is(data: bytes) -> bytes:
    return data


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        take: decodes all of it; equal inputs give equal values.
        refuses: the error that it documents.
        corpus: valid inputs, before ``fit``.
        fit: puts the checksums on.
        write: encodes a value again, if there is a way.
        canonical: whether that gives the very bytes that were accepted.
        byte_by_byte: decodes the same byte by byte, if it is one of a stream.
        bend: puts something odd in the place of one value, in what has a structure.
        runs: other functions that decode, and are run by this one.
    """

    take: Callable[[bytes], object]
    refuses: type[Exception] | tuple[type[Exception], ...]
    corpus: Sequence[bytes]
    fit: Callable[[bytes], bytes] = as_it_is
    write: Callable[[Any], bytes] | None = None
    canonical: bool = False
    byte_by_byte: Callable[[bytes], object] | None = None
    bend: Callable[[Random, bytes], bytes] | None = None
    runs: tuple[str, ...] = ()


def changed_piece(data: bytes) -> bytes:
    """A piece of a hundred elements of two bytes, after a delta."""
    piece = bytearray(200)
    apply_delta(memoryview(data), memoryview(piece), 2)
    return bytes(piece)


def event_of(data: bytes) -> object:
    """An event in a line of a file."""
    values: Any = json.loads(data)
    return from_json(cast("dict[str, Any]", values)) if isinstance(values, dict) else None


# -- what has a structure --------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 31, 1 << 32, (1 << 64) - 1, 0.5, math.nan, math.inf),
    *("", "x", "\0\n", "[]", [], [[]], {}, [0] * 40),
)


def bent(rng: Random, value: Any) -> Any:
    """A value with something odd in the place of one that is in it, texts of JSON included."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        return json.dumps(bent(rng, json.loads(value)))
    if not isinstance(value, list | dict) or not value or rng.random() < 0.1:
        return rng.choice(ODD)
    inside = cast("Any", value.copy())
    key = rng.choice(list(inside) if isinstance(value, dict) else range(len(inside)))
    inside[key] = bent(rng, inside[key])
    return inside


def bend_json(rng: Random, text: bytes) -> bytes:
    return json.dumps(bent(rng, json.loads(text)), separators=(",", ":")).encode()


def bend_msgpack(rng: Random, body: bytes) -> bytes:
    packed: bytes = msgpack.packb(bent(rng, msgpack.unpackb(body)))
    return packed


def bend_message(rng: Random, body: bytes) -> bytes:
    return body[:1] + bend_msgpack(rng, body[1:])


# -- control connections ---------------------------------------------------------------------------


def messages_in(pieces: Iterator[bytes]) -> tuple[list[object], str]:
    """All messages of a stream before it ends or is refused, and the refusal."""
    decoder, found = codec.StreamDecoder(), list[object]()
    try:
        for piece in pieces:
            found.extend(decoder.feed(piece))
    except RemoteProtocolError as error:
        return found, str(error)
    return found, ""


def framed(data: bytes) -> bytes:
    """A message's code and fields with a prefix that fits."""
    return codec.frame(data[0], data[1:]) if data else b""


def bytes_of(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


BODIES = tuple(
    bytes([wire[3]]) + wire[codec.PREFIX_BYTES :]
    for wire in map(codec.encode, test_codec.SAMPLES.values())
)

# -- handshakes ------------------------------------------------------------------------------------

TOKEN = b"the token of these tests"
OWN = Opening(Channel.LANE, b"0123456789abcdef", 1, PeerId(1), PeerId(2), 3)
OTHER = Opening(Channel.LANE, OWN.run, 1, PeerId(2), PeerId(1), 3, 4)


def greeted(hears: Callable[[], Handshake], data: bytes, most: int) -> object:
    """What one side has said and learnt after these bytes, or why it has hung up."""
    side, at = hears(), 0
    said = side.take_output()
    try:
        while side.awaited_bytes and at < len(data):
            count = min(most, side.awaited_bytes, len(data) - at)
            side.receive(data[at : at + count])
            at += count
            said += side.take_output()
    except RemoteProtocolError as error:
        return said, str(error)
    return said, side.remote


def dialled() -> Handshake:
    return Handshake.dial(OWN, secrets_of(TOKEN))


def accepted() -> Handshake:
    return Handshake.accept(lambda: OTHER, secrets_of(TOKEN), anyone)


def both_sides() -> tuple[bytes, bytes]:
    """What the dialler and the acceptor say to each other."""
    sides, said = (dialled(), accepted()), [b"", b""]
    read = [0, 0]
    for _ in range(8):
        for number, side in enumerate(sides):
            said[number] += side.take_output()
            other = said[1 - number][read[number] :][: side.awaited_bytes]
            read[number] += len(other)
            if other:
                side.receive(other)
    assert [len(each) for each in said] == [OPENING_BYTES + PROOF_BYTES] * 2
    return said[0], said[1]


DIALLER, ACCEPTOR = both_sides()


def header_said(data: bytes, most: int) -> object:
    """What a proxy's header has said after these bytes, or why it is refused."""
    found, at = ProxyHeader("10.0.0.9"), 0
    try:
        while found.awaited_bytes and at < len(data):
            count = min(most, found.awaited_bytes, len(data) - at)
            found.receive(data[at : at + count])
            at += count
    except RemoteProtocolError as error:
        return str(error)
    return at, found.awaited_bytes, found.source


HEADERS_OF_PROXIES = (
    *(proxied("192.0.2.7"), proxied("2001:db8::7", more=bytes(40)), proxied("224.0.0.1")),
    *(header(b"", 0, LOCAL), header(bytes(216), UNIX)),
)


def sealed_greeting(data: bytes) -> bytes:
    """An opening and a proof with checksums that fit, as far as they are there."""
    opening, proof = data[: OPENING_BYTES - 4], data[OPENING_BYTES : OPENING_BYTES + 96]
    if len(opening) < OPENING_BYTES - 4:
        return seal(data)
    opening = opening[:6] + struct.pack("<H", short_check(opening[:6])) + opening[8:]
    return seal(opening) + (seal(proof) if len(proof) == 96 else proof)


# -- lanes -----------------------------------------------------------------------------------------

HEADERS = tuple(
    FrameHeader(kind, OperationId(1, 2, 3, 4, 5), 6, 7, length)
    for kind in FrameKind
    for length in ([0] if kind in test_codec.BARE else [0, 8, 1 << 20])
)


class Splitting(Random):
    """Chooses the shortest piece, or the longest."""

    longest = False

    def choice(self, seq: Any) -> Any:
        return seq[-1] if self.longest else seq[0]


class NotSplitting(Splitting):
    longest = True


def lane_after(data: bytes, splitting: Splitting) -> object:
    """What a peer's port has become after these bytes: memory, answers, and the refusal.

    The greeting before them arrives at once; those of decoders above arrive byte by byte, too.
    """
    port, said = test_hostile_frames.Port(in_place=False), bytearray()
    port.plane.begin(test_hostile_frames.OPERATION)
    wire = port.accept(said.extend)
    test_hostile_frames.greet(wire, NotSplitting(), test_hostile_frames.UPSTREAM)
    wire.feed(data, splitting)
    port.check()
    seen = bytes(said), port.send.tobytes(), port.recv.tobytes(), str(wire.error)
    wire.end()
    return seen


def streams_of_frames() -> tuple[bytes, ...]:
    drawn, liar = Random(1), test_hostile_frames.Port(in_place=False).liar
    return tuple(
        b"".join(test_hostile_frames.draw_frame(drawn, liar) for _ in range(4)) for _ in range(40)
    )


# -- files -----------------------------------------------------------------------------------------

_IN_MEMORY = "/dev/shm"  # a disk may take milliseconds to drop what a file held before
_FOLDER = TemporaryDirectory(dir=_IN_MEMORY if Path(_IN_MEMORY).is_dir() else None)
FILES = Path(_FOLDER.name)
HEADER_KEY = b'"pccl.header":"'


def in_file(name: str, read: Callable[[Path], T]) -> Callable[[bytes], T]:
    """Reads bytes from a file that holds them."""

    def take(data: bytes) -> T:
        keep(FILES / name, data)
        return read(FILES / name)

    return take


def checkpoint_in(path: Path) -> Checkpoint:
    with Reader(path) as reader:
        return reader.checkpoint


def sealed_header(text: bytes) -> bytes:
    """A checkpoint's header with its length and a digest that fit."""
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    at = header.find(HEADER_KEY) + len(HEADER_KEY)
    if HEADER_KEY not in header or len(header) < at + 64:
        return header
    blank = header[:at] + b"0" * 64 + header[at + 64 :]
    digest = blake3(blank, derive_key_context="pccl 2026-11 checkpoint: header").hexdigest()
    return header[:at] + digest.encode() + header[at + 64 :]


def headers_of_checkpoints() -> tuple[bytes, ...]:
    lineage = Lineage(b"0123456789abcdef", OperationId(1, 2, 3, 4, 5))
    tensors = (
        CheckpointTensor("weights", DataType.FLOAT, (2, 3), False, 0, b"w" * DIGEST_BYTES),
        CheckpointTensor("steps", DataType.INT64, (), True, 24, b"s" * DIGEST_BYTES),
    )
    whole = (Checkpoint(7, lineage, tensors), Checkpoint(0, None, tensors[:1]))
    return tuple(header_of(one)[8:] for one in whole)


CHECKPOINTS = headers_of_checkpoints()
NEWS = ResultNews(
    *(b"c" * 32, 3, OperationId(1, 2, 3, 4, 5), DataType.FLOAT, 10, b"d" * 32),
    (PeerId(1), PeerId(9)),
)
STATE = b"\x95\x02\xc4\x100123456789abcdef\x07\xc4\x08incumben\xc3"
LAYOUT = StateLayout([Entry("a", DataType.FLOAT, 5), Entry("ü", DataType.INT8, 0, may_differ=True)])

TIMELINE = Timeline(
    1,
    3,
    10.0,
    (TimelineFault(2.5, FaultKind.KILL, 1), TimelineFault(3.0, FaultKind.JOINERS, amount=1)),
)

# -- texts -----------------------------------------------------------------------------------------


def text_of(take: Callable[[str], T]) -> Callable[[bytes], T]:
    """Decodes text that came as bytes, as an argument of a program does."""
    return lambda data: take(data.decode("utf-8", "surrogateescape"))


def scenario_of(take: Callable[[object], T], text: str) -> T:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TimelineError(str(error)) from error
    return take(given)


STORM = {"training": {"step_s": 0.5, "paces": [1, 4.0]}, "timeline": Timeline(2, 4, 10.0).to_json()}


# -- values ----------------------------------------------------------------------------------------

VALUES = 40
CODECS = tuple(
    make_codec(Quantization(wire, 16), dtype, Scratch())
    for wire in WireFormat
    if wire is not WireFormat.NONE
    for dtype in (DataType.FLOAT, DataType.DOUBLE, DataType.BFLOAT16)
)


def decoded_values(data: bytes) -> object:
    """The first byte says in which format the others are; they are cut or padded to its length."""
    which = CODECS[(data[0] if data else 0) % len(CODECS)]
    dtypes = (np.float32, np.float64, ml_dtypes.bfloat16)
    out = np.empty(VALUES, dtypes[CODECS.index(which) % len(dtypes)])
    length = which.encoded_bytes(VALUES)
    which.decode(np.frombuffer(data[1 : 1 + length].ljust(length, b"\0"), np.uint8), out)
    return out.tobytes()


def missing_in(data: bytes) -> list[int]:
    """The first two bytes say how many segments there are."""
    (size,) = struct.unpack("<H", data[:2].ljust(2, b"\0"))
    return bitmap.missing_in(data[2:], size)


# -- the table -------------------------------------------------------------------------------------

MAPPING = PortRequest(b"twelve bytes", "192.168.1.5", 41201)
_MAPPED = b"twelve bytes\x06\0\0\0" + struct.pack("!HH", 41201, 41202)
PCP_ANSWERS = (
    b"\x02\x81\0\0"
    + struct.pack("!II", 1200, 99)
    + bytes(12)
    + _MAPPED
    + bytes(10)
    + b"\xff\xff\xc6\x33\x64\x07",
    b"\x02\x81\0\x08" + struct.pack("!II", 30, 99) + bytes(12) + _MAPPED + bytes(16),
    b"\0\x81\0\x01\0\0\0\x63",
)
NAT_PMP_ANSWERS = (
    b"\0\x80\0\0\0\0\0\x63\xc6\x33\x64\x07",
    b"\0\x82\0\0\0\0\0\x63" + struct.pack("!HHI", 41201, 41202, 1200),
    b"\0\x82\0\x03\0\0\0\x63",
)
"""Of routers, byte for byte as RFC 6887 (section 11.1) and RFC 6886 (sections 3.2, 3.3) say."""


DECODERS: dict[str, Decoder] = {
    "pccl/protocol/codec.py decode": Decoder(
        lambda data: codec.decode(data[0] if data else 0, data[1:]),
        RemoteProtocolError,
        BODIES,
        write=lambda message: (
            bytes([codec.encode(message)[3]]) + codec.encode(message)[codec.PREFIX_BYTES :]
        ),
        bend=bend_message,
    ),
    "pccl/protocol/codec.py StreamDecoder._begun": Decoder(
        lambda data: messages_in(iter([data])),
        (),
        BODIES,
        framed,
        byte_by_byte=lambda data: messages_in(bytes_of(data)),
        bend=bend_message,
    ),
    "pccl/protocol/handshake/opening.py Opening.decode": Decoder(
        Opening.decode,
        RemoteProtocolError,
        (DIALLER[: OPENING_BYTES - 4], ACCEPTOR[: OPENING_BYTES - 4]),
        sealed_greeting,
        write=Opening.encode,
        canonical=True,
    ),
    "transports/relay.py decode_introduction": Decoder(
        lambda data: decode_introduction(data.ljust(INTRODUCTION_BYTES)[:INTRODUCTION_BYTES]),
        LinkError,
        (introduction(Address("10.0.0.7", 41)), introduction(Address("2001:db8::7", 65535))),
        write=introduction,
        canonical=False,
    ),
    "pccl/protocol/port_mapping/pcp.py PortRequest.read": Decoder(
        MAPPING.read,
        (),
        PCP_ANSWERS,
        runs=(
            "pccl/protocol/port_mapping/pcp.py _read_old",
            "pccl/protocol/port_mapping/pcp.py _unpack_host",
        ),
    ),
    "pccl/protocol/port_mapping/nat_pmp.py read": Decoder(
        lambda data: nat_pmp.read(data, MAPPING.port), (), NAT_PMP_ANSWERS
    ),
    "pccl/protocol/handshake/proxy_header.py ProxyHeader._decode": Decoder(
        lambda data: header_said(data, FIXED_BYTES),
        (),
        HEADERS_OF_PROXIES,
        byte_by_byte=lambda data: header_said(data, 1),
        runs=("pccl/protocol/handshake/proxy_header.py _decode_fixed",),
    ),
    "pccl/protocol/handshake/records.py plain_length": Decoder(
        lambda data: plain_length(data[:LENGTH_BYTES].ljust(LENGTH_BYTES, b"\0")),
        (),
        (b"\x05\0\0\0",),
        write=lambda length: length.to_bytes(LENGTH_BYTES, "little"),
    ),
    "pccl/protocol/handshake/exchange.py _proof_flaw": Decoder(
        lambda data: greeted(accepted, data, OPENING_BYTES),
        (),
        (DIALLER,),
        sealed_greeting,
        byte_by_byte=lambda data: greeted(accepted, data, 1),
    ),
    "pccl/protocol/handshake/exchange.py _check_version": Decoder(
        lambda data: greeted(dialled, data, OPENING_BYTES),
        (),
        (ACCEPTOR,),
        sealed_greeting,
        byte_by_byte=lambda data: greeted(dialled, data, 1),
    ),
    "pccl/protocol/frame.py decode_header": Decoder(
        decode_header,
        RemoteProtocolError,
        tuple(encode_header(header, 9)[:52] for header in HEADERS),
        seal,
        write=lambda header: encode_header(header, header.check),
        canonical=True,
        runs=("pccl/protocol/checksum.py unseal", "pccl/protocol/checksum.py unpack_sealed"),
    ),
    "transports/link.py": Decoder(
        lambda data: lane_after(data, NotSplitting()),
        (),
        streams_of_frames(),
        byte_by_byte=lambda data: lane_after(data, Splitting()),
    ),
    "transports/announcement.py decode_announcement": Decoder(
        decode_announcement,
        RemoteProtocolError,
        (
            encode_announcement(1 << 40, 99, [(1 << 41, 1 << 20)]),
            encode_announcement(8, 0, [(1 << 41, 8)] * 64),
        ),
        write=lambda where: encode_announcement(where.word, where.generation, where.parts),
        canonical=True,
    ),
    "transports/announcement.py decode_ask": Decoder(
        decode_ask,
        RemoteProtocolError,
        (encode_ask(bytes(16), (77, 76, 1)), encode_ask(bytes(16), range(1, 65))),
        write=lambda asked: encode_ask(*asked),
        canonical=True,
    ),
    "transports/announcement.py decode_at": Decoder(
        decode_at,
        RemoteProtocolError,
        (encode_at(77, 1 << 41),),
        write=lambda place: encode_at(*place),
        canonical=True,
    ),
    "pccl/runtime/state/results.py ResultNews.unpack": Decoder(
        ResultNews.unpack,
        RemoteProtocolError,
        (NEWS.pack(), replace(NEWS, weights=(0.5, 2.0)).pack()),
        write=ResultNews.pack,
        runs=("pccl/runtime/state/replay.py Replay.heard",),
    ),
    "pccl/runtime/state/frames.py numbers_of": Decoder(
        lambda data: numbers_of(bytearray(data)),
        RemoteProtocolError,
        (b"", pack_numbers([1, 0, 1 << 31])),
        write=pack_numbers,
        canonical=True,
    ),
    "pccl/state/layout.py StateLayout.unpack": Decoder(
        lambda data: StateLayout.unpack(data).entries,
        ValueError,
        (LAYOUT.pack(), b""),
        write=lambda entries: StateLayout(entries).pack(),
        runs=(
            "pccl/runtime/state/comparison.py StateComparison.take_layout",
            "pccl/state/fetch/published.py LayoutRequest.take",
        ),
    ),
    "pccl/state/delta.py apply_delta": Decoder(
        changed_piece,
        ValueError,
        (b"", bytes(200), b"\2\0\0\0\0\x40abcd", b"\1\0\0\0\x63ab", b"\0\0\0\0"),
    ),
    "pccl/state/versions.py name_and_shape": Decoder(
        lambda data: name_and_shape(Entry(data.decode("latin-1"), DataType.FLOAT, 6)),
        ValueError,
        (b"weights\x002x3", b"layer.0\x006", b"\0x\x001x6x1"),
    ),
    "pccl/collectives/bitmap.py missing_in": Decoder(
        missing_in, ValueError, (b"\x09\0\xff\x01", b"\0\0", b"\x08\0\x0f")
    ),
    "pccl/collectives/quantization/codec.py Codec.decode": Decoder(
        decoded_values,
        (),
        tuple(bytes([which, *Random(which).randbytes(300)]) for which in range(len(CODECS))),
        runs=(
            "pccl/collectives/quantization/affine.py AffineCodec._read",
            "pccl/collectives/quantization/packing.py unpack",
            "pccl/collectives/quantization/steps.py StepFormat.unpack",
            "pccl/collectives/quantization/symmetric.py SymmetricCodec._read",
            "pccl/runtime/collective/coding.py Coding.decode",
            "pccl/runtime/collective/coding.py Coding.decode_in_place",
        ),
    ),
    "pccl/_api/objects.py decode_object": Decoder(
        lambda data: repr(decode_object(np.frombuffer(data, np.uint8), 1, pickled=False)),
        RemoteProtocolError,
        (msgpack.packb({"a": [1, None, 2.5], "b": b"x"}), msgpack.packb([["y"], True])),
        bend=bend_msgpack,
    ),
    "pccl/protocol/handshake/token.py parse_token": Decoder(
        parse_token, ValueError, (RunToken(bytes(32), 1, bytes(16)).text().encode(),)
    ),
    "pccl/runtime/keys_file.py decode": Decoder(
        keys_file.decode,
        ValueError,
        (
            b'{"version": 1, "secret": "%s", "last_number": 1, "tokens": [{"number": 1, "secret": '
            b'"%s", "made_s": 5, "is_ticket": false, "revoked": false, "owners": []}], '
            b'"expelled": ["%s"]}' % (b"ab" * 32, b"cd" * 32, b"ef" * 16),
        ),
        bend=bend_json,
    ),
    "pccl/runtime/master_store.py _decode": Decoder(
        in_file("master.state", lambda path: DirectoryStore(path.parent).load()),
        LocalProtocolError,
        (STATE,),
        bend=bend_msgpack,
    ),
    "pccl/state/checkpoint_header.py checkpoint_of": Decoder(
        checkpoint_of,
        ValueError,
        CHECKPOINTS,
        sealed_header,
        write=header_of,
        runs=("pccl/state/checkpoint_header.py _parse",),
        bend=bend_json,
    ),
    "pccl/checkpoint.py Reader._read_header": Decoder(
        in_file("a.safetensors", checkpoint_in),
        ValueError,
        CHECKPOINTS[:1],
        lambda text: sealed_header(text) + bytes(32),
        bend=bend_json,
    ),
    "pccl/config.py read_token_file": Decoder(
        in_file("token", read_token_file), ValueError, (b"b7Qz-Tr4k_Wm9x-Jp2v_0f-Ny1c\n",)
    ),
    "pccl/addresses.py parse_address": Decoder(
        text_of(parse_address), ValueError, (b"127.0.0.1:48148", b"[::1]:9", b"localhost:1")
    ),
    "pccl/addresses.py parse_masters": Decoder(
        text_of(parse_masters), ValueError, (b"10.0.0.1:48148, [fe80::1]:9,a.example:1",)
    ),
    "pccl/addresses.py parse_proxies": Decoder(
        text_of(parse_proxies), ValueError, (b"192.0.2.1, 10.0.0.0/24,fe80::/10",)
    ),
    "pccl/addresses.py parse_advertised": Decoder(
        text_of(parse_advertised), ValueError, (b"a.example:7000-7009", b":80", b"[::1]", b"h")
    ),
    "stress/emulator/spec.py LinkSpec.parse": Decoder(
        text_of(LinkSpec.parse),
        ValueError,
        (b"rate=200mbit,rtt=80ms,flow=100mbit,jitter=2ms,window=8mib,corrupt=0.1%", b""),
        write=lambda spec: str(spec).encode(),
    ),
    "stress/timeline.py Timeline.from_json": Decoder(
        text_of(partial(scenario_of, Timeline.from_json)),
        TimelineError,
        (TIMELINE.to_text().encode(), Timeline(2, 4, 10.0).to_text().encode()),
        runs=("stress/timeline.py Timeline.load",),
        bend=bend_json,
    ),
    "stress/studies/storm/storm.py Storm.from_json": Decoder(
        text_of(partial(scenario_of, Storm.from_json)),
        TimelineError,
        (json.dumps(STORM).encode(),),
        runs=("stress/studies/storm/storm.py Storm.load",),
        bend=bend_json,
    ),
    "pccl/cli/runs/run_file.py parse_run": Decoder(
        parse_run,
        Unusable,
        (
            b'{"version": 2, "pid": 7, "master": "127.0.0.1:4000", "token": "b7Qz-Tr4k_Wm9x-Jp2v",'
            b' "command": "python train.py", "since_s": 1e9, "keys": ""}',
        ),
        bend=bend_json,
    ),
    "pccl/telemetry/evidence.py unpack_evidence": Decoder(
        unpack_evidence,
        RemoteProtocolError,
        (b'{"calls": [{"call": "barrier", "tag": 7}], "paths": [], "step": 12}',),
        fit=zlib.compress,
        bend=bend_json,
    ),
    "pccl/telemetry/events.py from_json": Decoder(
        event_of,
        (ValueError, RecursionError),
        (
            b'{"schema": "1.0", "event": "LinkLost", "peer_id": 3,'
            b' "name": "bob", "reason": "reset"}',
        ),
        bend=bend_json,
    ),
    "pccl/cli/processes/reports.py decode": Decoder(
        text_of(lambda line: reports.decode(line, (Timed,))),
        (),
        (reports.encode(Timed((0.1, 0.2))).encode(),),
        bend=bend_json,
    ),
}

ALL = pytest.mark.parametrize("name", DECODERS)
STREAMS = pytest.mark.parametrize("name", [k for k, one in DECODERS.items() if one.byte_by_byte])

# -- changed on the way ----------------------------------------------------------------------------

ANNOUNCED = (
    *(b"\xff", b"\xff\xff", b"\xff\xff\xff\xff", b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x7f" * 8),
    *(bytes([head]) + b"\xff\xff\xff\xff" for head in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)),
    *(b"\x00\x00\x00\x40", b"999999999", b"1e999", b"-1", b"[[[[[["),
)
"""Lengths that no memory is for, as the formats write them, and other numbers that bend rules."""


def changed(rng: Random, corpus: Sequence[bytes]) -> bytes:
    """A valid input after one to three things that happen to bytes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data += rng.randbytes(rng.randint(1, 9))
            case 3:
                other = rng.choice(corpus)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case 4:
                del data[at : at + rng.randint(1, 9)]
            case _:
                huge = rng.choice(ANNOUNCED)
                data[at : at + len(huge)] = huge
    return bytes(data)


def cases(decoder: Decoder, rng: Random) -> Iterator[bytes]:
    """Noise, and valid inputs that were changed before and behind their checksums."""
    noise = rng.randbytes(rng.choice((0, 1, 4, 16, 56, 88, 200)))
    yield noise
    yield decoder.fit(noise)
    yield decoder.fit(changed(rng, decoder.corpus))
    if decoder.bend is not None:
        yield decoder.fit(decoder.bend(rng, rng.choice([one for one in decoder.corpus if one])))
    yield changed(rng, [decoder.fit(one) for one in decoder.corpus])


REFUSED = object()


def taken_or_refused(decoder: Decoder, data: bytes) -> object:
    """What it is, or ``REFUSED``; anything else than the documented error gets out."""
    try:
        return decoder.take(data)
    except decoder.refuses:
        return REFUSED


# -- what holds for all ----------------------------------------------------------------------------


@ALL
def test_what_is_valid_is_taken(name: str) -> None:
    decoder = DECODERS[name]
    for raw in decoder.corpus:
        value = decoder.take(decoder.fit(raw))
        if decoder.write is not None:
            assert decoder.take(decoder.write(value)) == value


@ALL
@settings(max_examples=EXAMPLES)
@given(SEEDS, st.binary(max_size=120))
def test_any_bytes_are_decoded_or_refused(name: str, seed: int, noise: bytes) -> None:
    """Nothing but the documented error; and what is accepted means one thing."""
    decoder = DECODERS[name]
    for data in (noise, decoder.fit(noise), *cases(decoder, Random(seed))):
        value = taken_or_refused(decoder, data)
        if decoder.write is not None and value is not REFUSED:
            again = decoder.write(value)
            assert again == data if decoder.canonical else decoder.take(again) == value


@ALL
def test_deep_nesting_is_refused_or_flat(name: str) -> None:
    decoder = DECODERS[name]
    for part in (b"[", b'{"a":', b"\x91", b"\x81\x01"):
        deep = part * 50_000
        for data in (deep, decoder.fit(deep)):
            taken_or_refused(decoder, data)


@STREAMS
@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_byte_by_byte_is_the_same_as_at_once(name: str, seed: int) -> None:
    decoder = DECODERS[name]
    assert decoder.byte_by_byte is not None
    valid = decoder.fit(Random(seed).choice(decoder.corpus))
    for data in (valid, *cases(decoder, Random(seed))):
        assert decoder.byte_by_byte(data) == decoder.take(data)


@ALL
def test_what_is_only_announced_costs_nothing(name: str) -> None:
    """Each part of a few valid inputs is a huge length once, before its checksums and behind."""
    decoder, rng = DECODERS[name], Random(2)
    chosen = decoder.corpus if len(decoder.corpus) < 4 else rng.sample(decoder.corpus, 4)
    inputs = [
        form
        for raw, huge in itertools.product(chosen, ANNOUNCED)
        for at in rng.sample(range(len(raw) + 1), min(12, len(raw) + 1))
        for overwritten in [raw[:at] + huge + raw[at + len(huge) :]]
        for form in (decoder.fit(overwritten), overwritten)
    ]
    decoder.take(decoder.fit(chosen[0]))  # what is made once for all is not counted
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            taken_or_refused(decoder, data)
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY_MAX, data
    finally:
        tracemalloc.stop()


# -- the table is complete -------------------------------------------------------------------------

NOT_FROM_OUTSIDE = {
    "pccl/_api/objects.py encode_object": "what it has packed itself",
    "pccl/checks.py parse_size": "an option, of which click shows the error",
    "pccl/config.py parse_upload_max": "an option or a variable; test_config",
    "pccl/cli/bench/command.py Default.parse_args": "click's own name",
    "pccl/cli/command_line.py Wrapper.parse_args": "click's own name",
    "pccl/collectives/quantization/affine.py AffineCodec._write": "what it has packed itself",
    "pccl/collectives/quantization/symmetric.py SymmetricCodec._write": "what it has packed itself",
    "pccl/cli/runs/plan.py _from_file": "a file of the user; test_plan",
    "pccl/observe/records.py read_records": "a file of the user; test_records, test_recorder",
    "stress/emulator/sites/matrix.py SiteMatrix.parse": "a file of the user; test_matrix",
    "stress/emulator/sites/matrix.py SitePort.parse": "a part of such a file; test_matrix",
    "stress/studies/quality/results.py read": "a file of the user; test_results",
    "stress/studies/quality/speeds.py speeds": "lines of the processes that it starts",
    "stress/studies/quality/speeds.py train": "what the command that starts it has written",
    "stress/sim/scenarios/file.py _decode": "a file of the simulator; test_scenario_file",
    "stress/sim/scenarios/file.py _parse": "a file of the simulator; test_scenario_file",
    "stress/timeline.py read_file": "reads a file for others; test_timeline",
    "transports/tcp_socket.py measure_path": "the kernel's",
    "transports/local/socket_owner.py _inode": "the kernel's",
}
_NAMES = re.compile("_?(decode|parse|unpack|unseal|from_json)(_|$)")
_READERS = {"unpack", "unpack_from", "iter_unpack", "unpackb", "loads"}


def decoders_in(path: Path) -> Iterator[str]:
    """The functions that are called decoders, or that unpack; those inside others aside."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef(name=name):
                    yield from visit(child, (*names, name))
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    calls = {
                        each.func.attr
                        for each in ast.walk(child)
                        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
                    }
                    if _NAMES.match(name) or calls & _READERS:
                        yield f"{path.as_posix()} {'.'.join((*names, name))}"
                case _:
                    yield from visit(child, names)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), ())


def test_the_table_is_complete() -> None:
    root = ROOT
    found = {
        name.removeprefix(f"{root.as_posix()}/")
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
        for name in decoders_in(path)
    }
    known = {*DECODERS, *(other for one in DECODERS.values() for other in one.runs)}
    assert found - known - set(NOT_FROM_OUTSIDE) == set()
    assert set(NOT_FROM_OUTSIDE) - found == set()
