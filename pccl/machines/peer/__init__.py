"""One process's part in a run: turns its calls into requests, and what is decided into results.

* ``events``: what goes in, and the effects that come out.
* ``machine``: ``PeerMachine``, which owns all parts and dispatches events to them.
* ``contact``: which master is dialled, whether it is connected and alive; the outbox for effects.
* ``membership``: who the peer is, the rosters that have arrived, and its links to other peers.
* ``control``: the control connection: joining, resuming, returning, giving the master up.
* ``finals``: outcomes and answers, which are kept for another master; heartbeats acknowledge them.
* ``rounds``: the joint decisions that are asked for.
* ``calls``: which joint calls are made now, which end before they begin, and which wait.
* ``operations``: everything that is posted and has no outcome.
* ``eager``: which data may go ahead of the start.
* ``collectives``: operations from the call to the result.
* ``synchronization``: what differs if they are about shared state, also after a caller has left.
* ``words``: the errors, in words.
* ``news``: what has happened to a peer lately, for one that was removed.
"""
