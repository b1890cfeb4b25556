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
from functools import cache
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
    messages.EvidenceRequest: 26,
    messages.EvidenceReply: 27,
    messages.Holdings: 12,
    messages.SyncRequest: 13,
    messages.StatesCompared: 14,
    messages.Prefetched: 15,
    messages.StoreRequest: 28,
    messages.KnownEntry: 29,
    messages.AddressQuery: 31,
    messages.AnnounceVersions: 32,
    messages.Subscribe: 33,
    messages.ReaderLives: 34,
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
    messages.Meet: 90,
    messages.EvidenceQuery: 88,
    messages.EvidenceReport: 89,
    messages.Undialable: 86,
    messages.AddressIs: 95,
    messages.OperationNarrowed: 91,
    messages.RoundAwaits: 92,
    messages.StoreAnswer: 93,
    messages.Subscribed: 96,
    messages.CurrentVersion: 97,
}
"""The code of each type of message."""


class _Invalid(Exception):
    """A value does not fit its field."""


def encode(message: Message) -> bytes:
    """Return the bytes of one message, prefix included."""
    code = CODES[type(message)]
    body: bytes = msgpack.packb(_encoder_of(code)(message), use_bin_type=True)
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
    kind = _KINDS.get(code)
    if kind is None:
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
        reason = f"the fields of a {kind.__name__} are not valid MessagePack: {error}"
        raise RemoteProtocolError(func="control", reason=reason) from error
    try:
        return typing.cast("Message", _decoder_of(code)(value))
    except _Invalid as error:
        reason = f"malformed {kind.__name__}: {error}"
        raise RemoteProtocolError(func="control", reason=reason) from error


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
#
# The encoder and the decoder of a type are written as source text and compiled at their first use,
# as ``dataclasses`` does for ``__init__``. So a message costs one call instead of one per field.


_Convert = Callable[[Any], Any]


def _cut(text: str, limit: int) -> str:
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


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


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


@cache
def _fields_of(kind: Any) -> list[tuple[str, Any]]:
    """Return name and type of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name]) for field in fields(kind)]


def _compiled(source: str, names: dict[str, Any]) -> _Convert:
    """Return the function ``convert`` that ``source`` defines; it may use ``names``."""
    exec(source, names)  # it has names and limits of our types, and nothing from outside
    return typing.cast("_Convert", names["convert"])


@cache
def _encoder_of(code: int) -> _Convert:
    """Build the function from a message of the type to the list that msgpack takes."""
    return _compiled(f"convert = lambda value: {_encoded(_KINDS[code], 'value', 0)}", {"cut": _cut})


def _encoded(hint: Any, value: str, depth: int) -> str:
    """Return the expression of the encoded form of ``value``, itself an expression."""
    if isinstance(hint, typing.NewType):
        return _encoded(hint.__supertype__, value, depth)
    hint, limit = _bounded(hint)
    if typing.get_origin(hint) is tuple:
        item = f"item{depth}"
        encoded = _encoded(typing.get_args(hint)[0], item, depth + 1)
        return value if encoded == item else f"[{encoded} for {item} in {value}]"
    if _is_optional(hint):
        some = _encoded(typing.get_args(hint)[0], value, depth)
        return value if some == value else f"(None if {value} is None else {some})"
    if hint is str:
        return f"cut({value}, {limit})"
    if _is_record(hint):
        items = [_encoded(kind, f"{value}.{name}", depth) for name, kind in _fields_of(hint)]
        return f"[{', '.join(items)}]"
    return value  # msgpack takes numbers, enums, booleans and bytes unchanged


def _named(value: Any) -> str:
    """Describe a value in a few words. Only None and numbers are shown: a text may be huge."""
    shown = value is None or isinstance(value, int | float)
    return repr(value) if shown else f"a {type(value).__name__}"


class _DecoderSource:
    """The source text of a strict decoder, while it is written.

    Args:
        kind: the dataclass to decode.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.names: dict[str, Any] = {"Invalid": _Invalid, "named": _named, "text": _decoded_text}
        self._lines = ["def convert(value):"]
        self._indent = 1
        self._variables = 0
        self._read(kind, "value")
        self._write("return value")
        self.text = "\n".join(self._lines)

    def _write(self, line: str) -> None:
        self._lines.append("    " * self._indent + line)

    def _refuse_unless(self, condition: str, reason: str) -> None:
        self._write(f"if not ({condition}):")
        self._write(f"    raise Invalid(f{reason!r})")

    def _named_as(self, what: Any, name: str) -> str:
        """Make ``what`` available to the decoder; return its name there."""
        name = f"{name}_{len(self.names)}"
        self.names[name] = what
        return name

    def _new_variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"

    def _read(self, hint: Any, value: str) -> None:
        """Write statements that check the variable ``value``, and replace it where necessary."""
        if isinstance(hint, typing.NewType):
            self._read(hint.__supertype__, value)
            return
        hint, limit = _bounded(hint)
        origin = typing.get_origin(hint)
        if origin is tuple:
            self._read_tuple(typing.get_args(hint)[0], limit, value)
        elif _is_optional(hint):
            self._write(f"if {value} is not None:")
            self._indent += 1
            self._read(typing.get_args(hint)[0], value)
            self._indent -= 1
        elif _is_record(hint):
            self._read_dataclass(hint, value)
        elif hint is int:
            self._read_integer(_U64, value)
        elif origin is typing.Annotated:
            annotation = typing.get_args(hint)[1]
            if isinstance(annotation, Below):
                self._read_integer(annotation, value)
            else:
                self._read_float(annotation, value)
        elif hint is str:
            self._write(f"{value} = text({value}, {limit})")
        elif hint is bytes:
            self._refuse_unless(f"type({value}) is bytes", f"{{named({value})}} is not bytes")
            reason = f"a byte string has {{len({value})}} bytes, over {limit}"
            self._refuse_unless(f"len({value}) <= {limit}", reason)
        elif hint is bool:
            self._refuse_unless(f"type({value}) is bool", f"{{named({value})}} is not bool")
        else:
            self._read_enum(hint, value)

    def _read_integer(self, limit: Below, value: str) -> None:
        reason = f"{{named({value})}} is not an integer from 0 to {limit.bound - 1}"
        self._refuse_unless(f"type({value}) is int and 0 <= {value} < {limit.bound}", reason)

    def _read_float(self, limit: UpTo, value: str) -> None:
        least, most = limit.smallest, limit.largest
        reason = f"{{named({value})}} is not a float from {least:g} to {most:g}"
        is_fine = f"type({value}) is float and {least!r} <= {value} <= {most!r}"
        self._refuse_unless(is_fine, reason)

    def _read_enum(self, kind: type[enum.IntEnum], value: str) -> None:
        members = self._named_as({int(member): member for member in kind}, "members")
        reason = f"{{named({value})}} is not a {kind.__name__}"
        self._refuse_unless(f"type({value}) is int and {value} in {members}", reason)
        self._write(f"{value} = {members}[{value}]")

    def _read_tuple(self, item_hint: Any, limit: int, value: str) -> None:
        self._refuse_unless(f"type({value}) is list", f"{{named({value})}} is not a list")
        reason = f"a list has {{len({value})}} items, over {limit}"
        self._refuse_unless(f"len({value}) <= {limit}", reason)
        item, items = self._new_variable(), self._new_variable()
        self._write(f"{items} = []")
        self._write(f"for {item} in {value}:")
        self._indent += 1
        self._read(item_hint, item)
        self._write(f"{items}.append({item})")
        self._indent -= 1
        self._write(f"{value} = tuple({items})")

    def _read_dataclass(self, kind: Any, value: str) -> None:
        hints = [hint for _, hint in _fields_of(kind)]
        self._refuse_unless(f"type({value}) is list", f"{{named({value})}} is not a list")
        reason = f"{kind.__name__} has {len(hints)} fields, not {{len({value})}}"
        self._refuse_unless(f"len({value}) == {len(hints)}", reason)
        variables = [self._new_variable() for _ in hints]
        if hints:
            self._write(f"{', '.join(variables)}, = {value}")
        for hint, variable in zip(hints, variables, strict=True):
            self._read(hint, variable)
        self._write(f"{value} = {self._named_as(kind, kind.__name__)}({', '.join(variables)})")


def _decoded_text(value: Any, limit: int) -> str:
    if type(value) is not str:
        raise _Invalid(f"{_named(value)} is not str")
    nbytes = len(value.encode())
    if nbytes > limit:
        raise _Invalid(f"a text has {nbytes} bytes, over {limit}")
    return value if value.isprintable() else _cut(printable(value), limit)


@cache
def _decoder_of(code: int) -> _Convert:
    """Build the strict decoder of a type of message."""
    source = _DecoderSource(_KINDS[code])
    return _compiled(source.text, source.names)


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
    if _is_optional(hint):
        return _largest(typing.get_args(hint)[0])
    if hint is str or hint is bytes:
        return (3 if limit < 1 << 16 else 5) + limit
    if _is_record(hint):
        kinds = [kind for _, kind in _fields_of(hint)]
        return _sequence_head(len(kinds)) + sum(map(_largest, kinds))
    return _NUMBER_BYTES_MAX


def _largest_message(kind: type[Any]) -> int:
    return min(_largest(kind), _NARROWER.get(kind, CONTROL_MESSAGE_BYTES_MAX))


_NUMBER_BYTES_MAX = 9
_NARROWER: dict[type[Any], int] = {
    messages.Heartbeat: HEARTBEAT_BYTES_MAX,
    messages.OperationRequest: HEARTBEAT_BYTES_MAX,  # only a small subset exchanges blocks
}
"""Types whose senders observe a lower limit than the sum of their fields' limits."""

_KINDS: dict[int, type[Any]] = {code: kind for kind, code in CODES.items()}

BYTES_MAX: dict[type[Any], int] = {kind: _largest_message(kind) for kind in CODES}
"""The size of the largest message of each type, without its prefix."""
