"""Pure state machines: an event and the time go in, effects come out in the order of execution.

* ``machine``: the base class of the peer's and the master's machine.
* ``history``: the last events and effects of a machine, printed when it fails.
* ``ticks``: detects that this process slept: the silence of other processes then proves nothing.
* ``reachability``: which peers can be dialled, and tests of newcomers' addresses.
* ``router_path``: whether a peer asks its router for a port.
* ``port_mapper``: when it asks the router, in which protocol, and when again.
* ``repair``: how an operation in a ring continues after members were lost.
* ``results``: the results of committed operations.
* ``blocks``: the lengths of blocks in an exchange, from a caller's buffers.
* ``batch``: which errors allow a retry of a reduce, and a list of reduces as one call.
* ``key_value``: the run's store: the part of the master, and that of each peer.
* ``publication``: published versions of shared state: the parts of all processes.
* ``peer``: one process of a run.
* ``master``: the coordinator of a run: it admits and removes peers, and decides outcomes.
"""
