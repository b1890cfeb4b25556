"""An in-memory network in virtual time, with seeded faults.

* ``events``: virtual time, and the order of all events in the network.
* ``ports``: the port of a host: a queue each way, for all its connections together.
* ``routes``: the route from one host to another: latency, bandwidth, gates.
* ``run_queue``: decides when a simulated process runs: at once, late, or not before it is resumed.
* ``receive_buffer``: holds data that has arrived at a process, until the process reads it.
* ``pipe``: one direction of a connection.
* ``connection``: one end of a connection, as its process sees it.
* ``memory``: processes of one machine that pull segments from each other's memory.
* ``nat``: address translators: which address a connection gets outside, and what comes in. Pure.
* ``addresses``: the addresses of hosts, which address others see, and which hosts reach which.
* ``network``: many hosts in one process; one seed determines all that happens.
"""
