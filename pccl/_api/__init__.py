"""The code that both communicators share, from a caller's arguments to the engine and back.

* ``signatures``: makes the methods of both communicators from one signature.
* ``arguments``: checks every argument of a call, and makes a request from them.
* ``exchange_arguments``: the same for exchanges and reductions of parts.
* ``objects``: calls with objects: as MessagePack, or pickle if the caller trusts all members.
* ``group_calls``: the asyncio calls of a group or a subgroup.
* ``store``: the calls to the run's store.
* ``session``: the engine of a communicator on the I/O thread.
* ``callers``: threads and tasks that call, and whether all of them wait in joint calls.
* ``recording``: the record of a peer, as an answer or in a file.
* ``evidence``: the answers of a peer to questions through the master.
* ``reports``: the reports of a peer to its program: members, and the status.
* ``handles``: the outcome of a reduce that runs in the background.
* ``listening``: where a peer listens, and the address that it announces.
* ``base``: base classes of communicators and subgroups: construction, and calls that do not wait.
* ``draining``: on SIGTERM this peer leaves the run before the program ends.
"""
