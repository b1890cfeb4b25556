"""Moving bytes: the only room with sockets.

* ``base``: the seam between the runtime and the network: what a transport must offer.
* ``outgoing``: frames on their way out: descriptors of the sender's memory.
* ``sinks``: sinks: where the payload of a frame goes.
* ``link``: a link to one other peer, and its lanes: connections that carry frames.
* ``tcp``: the real network: TCP over raw non-blocking sockets, on any asyncio loop (uvloop
  included).
* ``tcp_socket``: how a TCP socket begins and ends: options, addresses, the first and the last
  packets.
* ``open_files``: how many descriptors this process may have, and a few more if the system allows
  it.
* ``sim``: an in-memory network in virtual time, with seeded faults.
"""
