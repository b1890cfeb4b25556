"""An in-memory network in virtual time, with seeded faults.

* ``events``: virtual time: the one order in which everything in the network happens.
* ``routes``: the way from one host to another: latency, bandwidth, gates.
* ``run_queue``: when a simulated process gets to run: at once, late, or not at all until somebody
  thaws it.
* ``receive_buffer``: what has arrived at one end of a connection, until the process there reads it.
* ``pipe``: one direction of a connection.
* ``connection``: one end of a connection, as its process sees it.
* ``network``: many hosts in one process, everything from one seed.
"""
