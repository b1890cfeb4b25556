"""Shared states of a few small pieces, and links that keep what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameHeader
from pccl.protocol.types import PeerId
from pccl.runtime.hashing import hash_here
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import Loose
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload

PIECE = 64


class Recorder(Link):
    """Up, and keeps what is sent."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.sent: list[tuple[FrameHeader, Payload]] = []

    @property
    def up(self) -> bool:
        return True

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        self.sent.append((header, payload))

    def revoke(self, operation: object) -> None:
        self.sent = [one for one in self.sent if one[0].operation != operation]


def memory_of(values: npt.NDArray[Any], *, track_touched: bool = False) -> StateMemory:
    """One tensor, hashed."""
    memory = StateMemory(
        [Loose("w", values, DataType.UINT8)], piece_bytes=PIECE, track_touched=track_touched
    )
    hash_here(memory, memory.stale_pieces())
    memory.hashed([0])
    return memory


def filled(value: int, pieces: int, *, track_touched: bool = False) -> StateMemory:
    """So many pieces of one value."""
    values = np.full(pieces * PIECE, value, np.uint8)
    return memory_of(values, track_touched=track_touched)
