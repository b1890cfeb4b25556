"""The encoding of control messages: length-prefixed MessagePack, strictly decoded.

After the handshake every message is a prefix of 16 bytes and a MessagePack array of its fields. The
prefix, little-endian, has a u32 with the type's code (upper 8 bits) and the array's length (lower
24), the array's XXH3-64 (u64), and the CRC-32 of these twelve bytes. The decoder verifies length
and array before use. From the prefix, it refuses a message that is too large or not allowed.

Decoding accepts exactly what encoding produces: the right number of fields, the right types,
integers in range, bounded text and lists, and no further bytes. The decoder replaces unprintable
characters in all texts, so that no sender can forge lines in the logs of other processes.
"""

from __future__ import annotations

import enum
import struct
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any
from zlib import crc32

import msgpack

from pccl.protocol import messages
from pccl.protocol.checksum import SEAL_BYTES, DamagedData, bytes_hash, unseal
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.texts import printable
from pccl.protocol.limits import (
    BYTE_STRING_MAX,
    CONTROL_MESSAGE_BYTES_MAX,
    HEARTBEAT_BYTES_MAX,
    SEQUENCE_ITEMS_MAX,
    TEXT_BYTES_MAX,
)
from pccl.protocol.messages import Message
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import AtMost, Below, UpTo

_LENGTH_BITS = 24
_PREFIX = struct.Struct("<IQ")
PREFIX_BYTES = _PREFIX.size + SEAL_BYTES
_U64 = Below(1 << 64)

CODES: dict[type[Any], int] = {
    messages.Register: 1,
    messages.Resume: 2,
    messages.Goodbye: 3,
    messages.Heartbeat: 4,
    messages.RoundRequest: 5,
    messages.OperationRequest: 6,
    messages.OperationDone: 7,
    messages.Withdraw: 8,
    messages.OutcomeQuery: 9,
    messages.LinkReport: 10,
    messages.BlockedReply: 11,
    messages.Return: 16,
    messages.KnownRoster: 17,
    messages.KnownOutcome: 18,
    messages.KnownAnswer: 19,
    messages.Reported: 20,
    messages.StatusRequest: 21,
    messages.LinksMeasured: 22,
    messages.RunQuery: 23,
    messages.Damaged: 24,
    messages.AddressProbed: 25,
    messages.Holdings: 12,
    messages.SyncRequest: 13,
    messages.StatesCompared: 14,
    messages.Prefetched: 15,
    messages.Registered: 64,
    messages.LinkPlan: 65,
    messages.Resumed: 66,
    messages.Refused: 67,
    messages.Admitted: 68,
    messages.RosterChanged: 69,
    messages.RoundClosed: 70,
    messages.OperationStarted: 71,
    messages.OperationEnded: 72,
    messages.MasterHeartbeat: 73,
    messages.RoundWaits: 74,
    messages.OperationWaits: 75,
    messages.BlockedQuery: 76,
    messages.AdmissionWaits: 77,
    StatusReport: 82,
    messages.HoldingsQuery: 78,
    messages.Repair: 79,
    messages.SyncStarted: 80,
    messages.CompareStates: 81,
    messages.RunIs: 83,
    messages.Proposed: 84,
    messages.ProbeAddress: 85,
    messages.DialNewcomers: 87,
    messages.Undialable: 86,
}
"""The code of each type of message."""


class _Invalid(Exception):
    """A value does not fit its field."""


def encode(message: Message) -> bytes:
    """Return the bytes of one message, prefix included."""
    code, encode_fields = _ENCODERS[type(message)]
    body: bytes = msgpack.packb(encode_fields(message), use_bin_type=True)
    assert len(body) <= BYTES_MAX[type(message)], "message too large to be accepted"
    return frame(code, body)


def frame(code: int, body: bytes) -> bytes:
    """Put the prefix in front of a message."""
    word = code << _LENGTH_BITS | len(body)
    prefix = _PREFIX.pack(word, bytes_hash(body))
    return prefix + crc32(prefix).to_bytes(SEAL_BYTES, "little") + body


def decode(code: int, body: bytes) -> Message:
    """Decode one message from its type's code and its fields.

    Raises:
        RemoteProtocolError: ``body`` is not one well-formed message. Close the connection.
    """
    name, decode_fields = _DECODERS.get(code, (None, None))
    if decode_fields is None:
        raise RemoteProtocolError(func="control", reason=f"unknown message code {code}")
    try:
        value: Any = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_array_len=min(SEQUENCE_ITEMS_MAX, len(body)),  # allocated before the items come
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        reason = f"the fields of a {name} are not valid MessagePack: {error}"
        raise RemoteProtocolError(func="control", reason=reason) from error
    try:
        return typing.cast("Message", decode_fields(value))
    except _Invalid as error:
        raise RemoteProtocolError(func="control", reason=f"malformed {name}: {error}") from error


class StreamDecoder:
    """Decodes the bytes of one direction, in any split, into messages.

    It stores at most one message, and refuses a longer one as soon as its prefix is complete.

    Args:
        bytes_max: returns the largest allowed size of a message type, at most its ``BYTES_MAX``;
            0: the sender may not send this type now.
    """

    def __init__(
        self, bytes_max: Callable[[type[Message]], int] = lambda kind: BYTES_MAX[kind]
    ) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Message]:
        """Add bytes, and yield the messages that are now complete.

        It calls ``bytes_max`` after the caller has processed the previous message.

        Raises:
            DamagedData: the bytes were changed in transit. Close the connection; the caller has
                received all earlier messages.
            RemoteProtocolError: the bytes violate the protocol. Close the connection.
        """
        self._buffer += data
        while len(self._buffer) >= PREFIX_BYTES:
            code, length, check = self._begun()
            end = PREFIX_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[PREFIX_BYTES:end])
            if bytes_hash(body) != check:
                raise DamagedData(func="control", reason="a message was damaged on the way")
            del self._buffer[:end]
            yield decode(code, body)

    def _begun(self) -> tuple[int, int, int]:
        """Return code, length and hash of the next message, whose prefix is complete."""
        prefix = self._buffer[:PREFIX_BYTES]
        word, check = _PREFIX.unpack(unseal(prefix, "control", "the prefix of a message"))
        code, length = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1
        kind = _KINDS.get(code)
        if kind is None:
            raise RemoteProtocolError(func="control", reason=f"unknown message code {code}")
        allowed = self._bytes_max(kind)
        if length > allowed:
            most = f"at most {allowed} are allowed" if allowed else "the sender may send none now"
            reason = f"{kind.__name__} has {length} bytes; {most}"
            raise RemoteProtocolError(func="control", reason=reason)
        return code, length, check


# -- dataclasses to plain lists and back -------------------------------------------------------


_Encoder = Callable[[Any], Any]


def _text_encoder(limit: int) -> _Encoder:
    def cut(text: str) -> str:
        return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")

    return cut


def _bounded(hint: Any) -> tuple[Any, int]:
    """Split the type of a text, bytes or list into the bare type and the limit of its length."""
    limit = 0
    if typing.get_origin(hint) is typing.Annotated and hint.__origin__ not in (int, float):
        hint, annotation = typing.get_args(hint)
        assert isinstance(annotation, AtMost)
        limit = annotation.count
    if hint is str:
        return hint, limit or TEXT_BYTES_MAX
    if hint is bytes:
        return hint, limit or BYTE_STRING_MAX
    return hint, limit or SEQUENCE_ITEMS_MAX


def _encoder_of(hint: Any) -> _Encoder | None:
    """Build the encoder of one annotated type; None: msgpack takes its values unchanged."""
    if isinstance(hint, typing.NewType):
        return _encoder_of(hint.__supertype__)
    hint, limit = _bounded(hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _tuple_encoder(_encoder_of(typing.get_args(hint)[0]))
    if origin in (types.UnionType, typing.Union):
        return _optional_encoder(_encoder_of(typing.get_args(hint)[0]))
    if hint is str:
        return _text_encoder(limit)
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass_encoder(hint)
    return None  # numbers, enums, booleans and bytes


def _tuple_encoder(encode_item: _Encoder | None) -> _Encoder | None:
    if encode_item is None:
        return None
    return lambda items: [encode_item(item) for item in items]


def _optional_encoder(encode_some: _Encoder | None) -> _Encoder | None:
    if encode_some is None:
        return None
    return lambda value: None if value is None else encode_some(value)


def _dataclass_encoder(kind: type[Any]) -> _Encoder:
    hints = typing.get_type_hints(kind, include_extras=True)
    plan = [(field.name, _encoder_of(hints[field.name])) for field in fields(kind)]
    if len(plan) > 1 and not any(encode_field for _, encode_field in plan):
        return attrgetter(*(name for name, _ in plan))  # a tuple, without a call of Python

    def encode_dataclass(value: Any) -> list[Any]:
        items = list[Any]()
        for name, encode_field in plan:
            item = getattr(value, name)
            items.append(item if encode_field is None else encode_field(item))
        return items

    return encode_dataclass


_Decoder = Callable[[Any], Any]


def _named(value: Any) -> str:
    """Describe a value in a few words. Only None and numbers are shown: a text may be huge."""
    shown = value is None or isinstance(value, int | float)
    return repr(value) if shown else f"a {type(value).__name__}"


def _decoder_of(hint: Any) -> _Decoder:
    """Build the strict decoder of one annotated type."""
    if isinstance(hint, typing.NewType):
        return _decoder_of(hint.__supertype__)
    hint, limit = _bounded(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        base, annotation = typing.get_args(hint)
        if base is float:
            assert isinstance(annotation, UpTo)
            return _float_decoder(annotation)
        assert base is int
        assert isinstance(annotation, Below)
        return _IntegerDecoder(annotation.bound)
    if origin is tuple:
        item, ellipsis = typing.get_args(hint)
        assert ellipsis is ...
        return _tuple_decoder(_decoder_of(item), limit)
    if origin in (types.UnionType, typing.Union):
        some, none = typing.get_args(hint)
        assert none is type(None)
        return _optional_decoder(_decoder_of(some))
    if hint is int:
        return _IntegerDecoder(_U64.bound)
    if hint is bool:
        return _flag_decoder
    if hint is bytes:
        return _bytes_decoder(limit)
    if hint is str:
        return _text_decoder(limit)
    if issubclass(hint, enum.IntEnum):
        return _enum_decoder(hint)
    assert is_dataclass(hint)
    return _dataclass_decoder(typing.cast("type[Any]", hint))


class _IntegerDecoder:
    """Accepts the integers from 0 to before ``bound``."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __call__(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < self.bound:
            raise _Invalid(f"{_named(value)} is not an integer from 0 to {self.bound - 1}")
        return value


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _bound_of(decoder: _Decoder) -> int:
    return decoder.bound if isinstance(decoder, _IntegerDecoder) else 0


def _float_decoder(limit: UpTo) -> _Decoder:
    def decode_float(value: Any) -> float:
        if type(value) is not float or not 0 <= value <= limit.largest:
            raise _Invalid(f"{_named(value)} is not a float from 0 to {limit.largest:g}")
        return value

    return decode_float


def _flag_decoder(value: Any) -> bool:
    if type(value) is not bool:
        raise _Invalid(f"{_named(value)} is not bool")
    return value


def _bytes_decoder(limit: int) -> _Decoder:
    def decode_bytes(value: Any) -> bytes:
        if type(value) is not bytes:
            raise _Invalid(f"{_named(value)} is not bytes")
        if len(value) > limit:
            raise _Invalid(f"a byte string has {len(value)} bytes, over {limit}")
        return value

    return decode_bytes


def _text_decoder(limit: int) -> _Decoder:
    cut = _text_encoder(limit)

    def decode_text(value: Any) -> str:
        if type(value) is not str:
            raise _Invalid(f"{_named(value)} is not str")
        nbytes = len(value.encode())
        if nbytes > limit:
            raise _Invalid(f"a text has {nbytes} bytes, over {limit}")
        return value if value.isprintable() else cut(printable(value))

    return decode_text


def _optional_decoder(decode_some: _Decoder) -> _Decoder:
    def decode_optional(value: Any) -> Any:
        return None if value is None else decode_some(value)

    return decode_optional


def _enum_decoder(kind: type[enum.IntEnum]) -> _Decoder:
    members = {int(member): member for member in kind}

    def decode_enum(value: Any) -> enum.IntEnum:
        member = members.get(value) if type(value) is int else None
        if member is None:
            raise _Invalid(f"{_named(value)} is not a {kind.__name__}")
        return member

    return decode_enum


def _tuple_decoder(decode_item: _Decoder, limit: int) -> _Decoder:
    bound = _bound_of(decode_item)

    def decode_tuple(value: Any) -> tuple[Any, ...]:
        if value.__class__ is not list:  # type checkers do not narrow this form
            raise _Invalid(f"{_named(value)} is not a list")
        if len(value) > limit:
            raise _Invalid(f"a list has {len(value)} items, over {limit}")
        items = list[Any]()
        for item in value:
            is_fine = type(item) is int and 0 <= item < bound
            items.append(item if is_fine else decode_item(item))
        return tuple(items)

    return decode_tuple


def _dataclass_decoder(kind: type[Any]) -> _Decoder:
    hints = typing.get_type_hints(kind, include_extras=True)
    decoders = tuple(_decoder_of(hints[field.name]) for field in fields(kind))
    bounds = tuple(map(_bound_of, decoders))
    optional = tuple(_is_optional(hints[field.name]) for field in fields(kind))

    def decode_dataclass(value: Any) -> Any:
        if value.__class__ is not list:  # type checkers do not narrow this form
            raise _Invalid(f"{_named(value)} is not a list")
        if len(value) != len(decoders):
            raise _Invalid(f"{kind.__name__} has {len(decoders)} fields, not {len(value)}")
        items = list[Any]()
        for decode_item, bound, is_optional, item in zip(
            decoders, bounds, optional, value, strict=True
        ):
            # Most fields are integers, or nil: each call of a decoder less counts.
            is_fine = is_optional if item is None else type(item) is int and 0 <= item < bound
            items.append(item if is_fine else decode_item(item))
        return kind(*items)

    return decode_dataclass


# -- how large a message can be ------------------------------------------------------------------


def _sequence_head(count: int) -> int:
    return 1 if count < 16 else 3 if count < 1 << 16 else 5


def _largest(hint: Any) -> int:
    """Return the bytes of the longest value of one annotated type."""
    if isinstance(hint, typing.NewType):
        return _largest(hint.__supertype__)
    hint, limit = _bounded(hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _sequence_head(limit) + limit * _largest(typing.get_args(hint)[0])
    if origin in (types.UnionType, typing.Union):
        return _largest(typing.get_args(hint)[0])
    if hint is str or hint is bytes:
        return (3 if limit < 1 << 16 else 5) + limit
    if isinstance(hint, type) and is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        kinds = [hints[field.name] for field in fields(hint)]
        return _sequence_head(len(kinds)) + sum(map(_largest, kinds))
    return _NUMBER_BYTES_MAX


def _largest_message(kind: type[Any]) -> int:
    return min(_largest(kind), _NARROWER.get(kind, CONTROL_MESSAGE_BYTES_MAX))


_NUMBER_BYTES_MAX = 9
_NARROWER: dict[type[Any], int] = {messages.Heartbeat: HEARTBEAT_BYTES_MAX}
"""Types whose senders observe a lower limit than the sum of their fields' limits."""

_KINDS: dict[int, type[Any]] = {code: kind for kind, code in CODES.items()}

BYTES_MAX: dict[type[Any], int] = {kind: _largest_message(kind) for kind in CODES}
"""The size of the largest message of each type, without its prefix."""

_DECODERS = {code: (kind.__name__, _dataclass_decoder(kind)) for kind, code in CODES.items()}
_ENCODERS = {kind: (code, _dataclass_encoder(kind)) for kind, code in CODES.items()}
