"""Transports move bytes between processes. Of the library, only this package opens sockets.

* ``base``: the interface that every transport implements, and that the runtime uses.
* ``sealed``: an encrypted connection over a connection of any transport.
* ``relay``: connections through a relay, and what a relay does with them.
* ``pacing``: a transport whose connections together keep an upload limit.
* ``outgoing``: frames that wait to be sent; they refer to the sender's memory.
* ``sinks``: destinations for the payload of incoming frames.
* ``link``: the link to one other peer, and its lanes: the connections that carry frames.
* ``tcp``: TCP over raw non-blocking sockets, on any asyncio loop (uvloop included).
* ``tcp_listener``: a port that accepts connections.
* ``tcp_dial``: several addresses of one process, and two processes that dial each other.
* ``tcp_socket``: TCP sockets: options, addresses, connecting, and orderly closing.
* ``datagrams``: datagrams to the router of this machine.
* ``announcement``: payloads of the frames that say where a segment is in the sender's memory.
* ``local``: links between processes of one machine, which copy from each other's memory.
* ``open_files``: raises the limit on open file descriptors, as far as the system allows it.
* ``sim``: an in-memory network in virtual time, with seeded faults.
"""
