"""Moving bytes: the only room with sockets.

* ``base``: the seam. ``Transport`` listens and dials, ``Connection`` is one byte stream, and a
  ``Receiver`` is asked for memory before every read.
* ``tcp``: real sockets on an asyncio loop; ``tcp_socket``: their options, addresses and endings;
  ``open_files``: how many descriptors there are.
* ``sim``: an in-memory network in virtual time, with seeded faults; ``sim_pipe``: how its bytes
  move.
* ``lane``: frames on one connection. ``link``: all lanes between two peers.
"""
