"""``Opening``: the first bytes that each side of a connection sends.

Little-endian, 192 bytes:

    magic "PCCL" | version u16 | check u16 | security u8 | channel u8 | lane u16 | lanes u16
    flags u16 | term u32 | run 16 bytes | source u64 | target u64 | token id u64
    share 32 bytes | key 32 bytes | certificate 64 bytes | seal u32

A field that a side does not know yet is zero. Magic and version are the same in every version;
``check`` verifies them (CRC-16), and ``seal`` the whole opening (CRC-32).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from pccl.protocol.checksum import SEAL_BYTES, seal, short_check, unpack_sealed
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.keys import SIGNATURE_BYTES
from pccl.protocol.handshake.proxy_header import begins_header
from pccl.protocol.limits import PROTOCOL_VERSION
from pccl.protocol.types import KEY_BYTES, NOBODY, PeerId

MAGIC = b"PCCL"
PREFIX = struct.Struct("<4sHH")
_OPENING = struct.Struct(f"<4sHHBBHHHI16sQQQ{KEY_BYTES}s{KEY_BYTES}s{SIGNATURE_BYTES}s")
PREFIX_BYTES = PREFIX.size
OPENING_BYTES = _OPENING.size + SEAL_BYTES
RUN_BYTES = 16
NO_RUN = bytes(RUN_BYTES)

ENCRYPTS = 1
"""The sender wants the connection to be encrypted. The wish of one side is enough."""

HAS_AES = 2
"""The sender's processor has instructions for AES."""

ASKS_ADDRESS = 4
"""The sender, which dials a peer with a probe, wants an introduction: how the peer sees it."""

READS = 8
"""The sender of a lane is outside the run: the lane carries published versions only."""

_FLAGS = ENCRYPTS | HAS_AES | ASKS_ADDRESS | READS

assert (PREFIX_BYTES, OPENING_BYTES) == (8, 192)


class Security(enum.IntEnum):
    """What both sides prove, in addition to the secrets of their keys."""

    NONE = 0
    TOKEN = 1
    """They know the same token of the run."""


class Channel(enum.IntEnum):
    """The purpose of a connection."""

    CONTROL = 1
    """Messages between a peer (the dialler) and the master."""
    LANE = 2
    """Frames between two peers."""
    PROBE = 3
    """A master, or a peer on its behalf, tests whether a peer can be dialled. No data, except for
    an introduction, if it asks for one."""
    RELAY = 4
    """Bytes of a lane to ``target``, which the acceptor, a peer or a master, forwards unseen."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first bytes that a side sends."""

    channel: Channel
    run: bytes = NO_RUN
    term: int = 0
    source: PeerId = NOBODY
    """The sender; 0: a master, or a newcomer."""
    target: PeerId = NOBODY
    """The peer that the sender wants to reach, perhaps through a relay; 0: a master, or any
    dialler."""
    lane: int = 0
    """Number of the lane within its link."""
    lanes: int = 0
    """Number of lanes that the sender wants for the link; 0: the other side decides."""
    security: int = Security.NONE
    flags: int = 0
    """Of ``ENCRYPTS``, ``HAS_AES``, ``ASKS_ADDRESS`` and ``READS``."""
    token_id: int = 0
    """Number of the token that a dialler knows; 0: a token without a number, or none."""
    share: bytes = bytes(KEY_BYTES)
    """The public part of the sender's share of this connection."""
    key: bytes = bytes(KEY_BYTES)
    """The public key of the sender."""
    certificate: bytes = bytes(SIGNATURE_BYTES)
    """With this the master lets other peers recognize the sender before a roster names it."""
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """Return the bytes of the opening."""
        assert len(self.share) == len(self.key) == KEY_BYTES
        assert (len(self.run), len(self.certificate)) == (RUN_BYTES, SIGNATURE_BYTES)
        packed = _OPENING.pack(
            MAGIC, self.version, version_check(self.version), self.security, self.channel,
            self.lane, self.lanes, self.flags, self.term, self.run, self.source, self.target,
            self.token_id, self.share, self.key, self.certificate,
        )  # fmt: skip
        return seal(packed)

    @staticmethod
    def decode(data: bytes) -> Opening:
        """Decode ``OPENING_BYTES``.

        Raises:
            DamagedData: the bytes were changed in transit. Close the connection.
            RemoteProtocolError: the bytes are no opening. Close the connection.
        """
        if not data.startswith(MAGIC):
            raise not_ours()
        (
            _, version, _, security, channel, lane, lanes, flags, term, run, source, target,
            token_id, share, key, certificate,
        ) = unpack_sealed(_OPENING, data, "handshake", "the opening")  # fmt: skip
        if channel not in _CHANNELS or flags > _FLAGS:
            raise RemoteProtocolError(func="handshake", reason="the opening is malformed")
        return Opening(
            _CHANNELS[channel], run, term, PeerId(source), PeerId(target), lane, lanes,
            security, flags, token_id, share, key, certificate, version,
        )  # fmt: skip


_CHANNELS = {int(channel): channel for channel in Channel}


def version_check(version: int) -> int:
    """Return the checksum of magic and version."""
    return short_check(PREFIX.pack(MAGIC, version, 0)[:6])


def not_ours(begins: bytes = b"") -> RemoteProtocolError:
    """Return the error about a process that sends something else; ``begins``: its first bytes."""
    reason = "the process does not speak this protocol"
    if begins_header(begins):
        reason = (
            "it sent a PROXY header. A master accepts one, from a proxy that it was told: pccl "
            "master --proxy-from ADDRESS"
        )
    return RemoteProtocolError(func="handshake", reason=reason)
