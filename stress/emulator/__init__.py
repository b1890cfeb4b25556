"""The link emulator: a TCP relay that makes loopback behave like a real link, without root.

* ``spec``: what a link is like (``rate=200mbit,rtt=80ms,flow=100mbit``).
* ``shaper``: when each byte leaves and arrives; pure, in virtual nanoseconds.
* ``tuning``: what the relay's sockets are given; ``alarm``: a timer finer than the loop's.
* ``connection``: one relayed connection, both ways; ``sorting``: which link it belongs to.
* ``relay``: the listener, the links, the faults.
* ``thread``: a relay on a thread of its own, for tests and benchmarks.
* ``verify``: a plain TCP stream through a relay, measured beside what was asked for.
* ``loopback``: two plain processes and a connection without a relay: what the machine can do.

See ``docs/emulator.md``.
"""

from pccl.stress.emulator.connection import Side
from pccl.stress.emulator.relay import FlowStatus, Relay
from pccl.stress.emulator.shaper import Direction
from pccl.stress.emulator.sorting import SHARED, peer_of
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.emulator.thread import RelayThread

__all__ = [
    "SHARED",
    "Direction",
    "FlowStatus",
    "LinkSpec",
    "Relay",
    "RelayThread",
    "Side",
    "peer_of",
]
