"""``MasterMetrics``: the values of a master's metrics."""

from __future__ import annotations

import time
from collections import Counter

from pccl.observe.metrics import Reading, Readings, bytes_of, library_version
from pccl.runtime.master_server import MasterServer
from pccl.telemetry.events import RunChanged
from pccl.telemetry.stream import Stamped
from pccl.transports.base import Traffic


class MasterMetrics:
    """The metrics of one master. All methods run on the I/O thread.

    Args:
        server: the master.
    """

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self._version = library_version()
        self._began_s = time.monotonic()
        self._removals: Counter[str] = Counter()
        server.events.listen(self._note)

    def _note(self, stamped: Stamped) -> None:
        match stamped.event:
            case RunChanged(what="removed", cause=cause):
                self._removals[cause] += 1
            case _:
                pass

    def read(self) -> Readings:
        """Yield all values."""
        machine = self._server.machine
        members = machine.membership.members()
        connected = sum(peer.connection is not None for peer in members)
        yield Reading("pccl_info", (self._version, "", "", machine.run.hex()), 1)
        yield Reading("pccl_peers", ("member",), connected)
        yield Reading("pccl_peers", ("disconnected",), len(members) - connected)
        yield Reading("pccl_peers", ("newcomer",), len(machine.membership.pending()))
        yield Reading("pccl_operations_open", (), len(machine.ballots.open))
        yield Reading("pccl_term", (), machine.term)
        yield Reading("pccl_uptime_seconds", (), time.monotonic() - self._began_s)
        for cause, count in self._removals.items():
            yield Reading("pccl_removals_total", (cause,), count)
        yield from bytes_of("control", self._server.traffic)
        if (relay := self._server.relay) is not None:
            yield from bytes_of("relay", Traffic(relay.carried_bytes, relay.carried_bytes))
