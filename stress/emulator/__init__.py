"""The link emulator: a TCP proxy that makes loopback behave like a real link, without root.

* ``spec``: the description of an emulated link, as a text such as ``rate=200mbit,rtt=80ms``.
* ``shaper``: computes when each byte of a link leaves and arrives. Pure, in virtual nanoseconds.
* ``alarm``: an event-loop timer that fires within about 10 us of its deadline.
* ``tuning``: creates, configures and resets the sockets of the proxy.
* ``connection``: one proxied connection: two sockets, and a flow in each direction between them.
* ``sorting``: finds the link of a connection by the first bytes that its dialler sends.
* ``proxy``: the proxy, which forwards each connection to a target over an emulated link.
* ``nat``: hosts behind NATs, whose connections have the addresses that a model decides.
* ``sites``: a network of many sites, each with a namespace of the kernel, from a matrix of links.
* ``thread``: threads with an event loop, and a proxy on such a thread, for tests and benchmarks.
* ``command_line``: the commands ``python -m pccl.stress proxy`` and ``verify-link``.
* ``verify``: measures plain TCP streams through a proxy, to verify the emulator.

See ``docs/emulator.md``.
"""

from pccl.stress.emulator.connection import FlowStatus, Side
from pccl.stress.emulator.proxy import Proxy
from pccl.stress.emulator.shaper import Direction
from pccl.stress.emulator.sorting import SHARED, peer_of
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.emulator.thread import ProxyThread

__all__ = [
    "SHARED",
    "Direction",
    "FlowStatus",
    "LinkSpec",
    "Proxy",
    "ProxyThread",
    "Side",
    "peer_of",
]
