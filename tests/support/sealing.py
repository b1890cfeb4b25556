"""A transport whose connections are encrypted, as if handshakes had agreed on keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pccl.protocol.handshake.records import RecordKeys
from pccl.runtime.clock import Clock
from pccl.transports.base import Address, Connection, Listener, Transport
from pccl.transports.sealed import SealedConnection

DIALLERS, ACCEPTORS = b"d" * 32, b"a" * 32
"""The keys of each direction."""


class SealedTransport:
    """Encrypts the connections of another transport."""

    def __init__(self, transport: Transport, clock: Clock, *, has_aes: bool = True) -> None:
        self._transport = transport
        self._clock = clock
        self._has_aes = has_aes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen, and encrypt what is accepted."""
        keys = RecordKeys(ACCEPTORS, DIALLERS, self._has_aes)

        def wrap(connection: Connection) -> None:
            on_connection(SealedConnection(connection, keys, self._clock))

        return await self._transport.listen(address, wrap)

    async def dial(self, address: Address, timeout_s: float, *args: Any) -> Connection:
        """Dial, and encrypt the connection."""
        keys = RecordKeys(DIALLERS, ACCEPTORS, self._has_aes)
        connection = await self._transport.dial(address, timeout_s, *args)
        return SealedConnection(connection, keys, self._clock)
