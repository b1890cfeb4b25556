"""The link emulator: a TCP relay that makes loopback behave like a real link, without root.

* ``spec``: what an emulated link is like, and how people write it: ``rate=200mbit,rtt=80ms``.
* ``shaper``: when each byte of a link's direction leaves and arrives: pure, in virtual nanoseconds.
* ``alarm``: a timer of a loop that rings within some ten microseconds of its time.
* ``tuning``: what the relay's sockets are given, and how they end.
* ``connection``: one relayed connection: two sockets, and between them a flow in each direction.
* ``sorting``: which link a connection belongs to, by the first bytes that its dialler sends.
* ``relay``: the relay: listens before a target, and passes every connection on by way of an
  emulated link.
* ``thread``: threads with an event loop of their own; and a relay on one, for tests and benchmarks.
* ``command_line``: the emulator's commands: ``python -m pccl.stress relay`` and ``verify-link``.
* ``verify``: a plain TCP stream through a relay, measured: does the emulator do what it says?

See ``docs/emulator.md``.
"""

from pccl.stress.emulator.connection import FlowStatus, Side
from pccl.stress.emulator.relay import Relay
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
