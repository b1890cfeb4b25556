"""Opens the one port of a peer."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.errors import LinkError
from pccl.runtime.requests import PeerOptions
from pccl.transports.base import Address, Connection, Listener, Transport


async def listen(
    transport: Transport, options: PeerOptions, accept: Callable[[Connection], None]
) -> Listener:
    """Listen on the host and a port of ``options``, and call ``accept`` with each connection.

    Raises:
        LinkError: none of the ports can be opened.
    """
    wanted, ports = options.listen, options.ports
    failures: list[str] = []
    for port in range(ports[0], ports[1] + 1) if ports else (wanted.port,):
        for host in ("::", "0.0.0.0") if wanted.host == "::" else (wanted.host,):
            try:  # "::" fails on a machine without IPv6
                return await transport.listen(Address(host, port), accept)
            except LinkError as error:
                failures.append(error.reason)
    raise LinkError(reason=f"this peer cannot open its port: {failures[-1]}")
