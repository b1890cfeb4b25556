"""One process of a run: turns its calls into requests to the master, and decisions into results.

* ``events``: the events that the machine takes, and the effects that it returns.
* ``machine``: ``PeerMachine``, which owns all parts and dispatches events to them.
* ``contact``: which master is dialled, whether it is connected and alive; the outbox for effects.
* ``membership``: the peer's identity, the rosters that have arrived, and its links to peers.
* ``control``: the control connection: joining, resuming, returning, giving the master up.
* ``finals``: outcomes and answers, which are kept for another master; heartbeats acknowledge them.
* ``rounds``: the rounds (joint decisions) that this peer has requested.
* ``calls``: which joint calls may be made now, which fail at once, and which are deferred.
* ``operations``: the operations that are posted and have no outcome.
* ``eager``: which small operations send data before they start.
* ``collectives``: operations from the call to the result.
* ``synchronization``: operations on shared state, also after a caller has left one.
* ``words``: the error texts.
* ``reporter``: the events of a peer for people, found in those of its machine.
"""
