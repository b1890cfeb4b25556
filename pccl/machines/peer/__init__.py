"""One process's part in a run: turns its calls into requests, and what is decided into results.

* ``events``: what goes in, and the effects that come out.
* ``machine``: ``PeerMachine``, which owns the rest.
* ``participant``: joining, the master as it is heard, and the end.
* ``round_caller``: joint decisions.
* ``contact``: the connection to the master, how long it may be silent, and the outbox for effects.
* ``join``: the attempt to become a member.
* ``membership``: who the peer is, the rosters that have arrived, and its links to other peers.
* ``rounds``: the joint decisions that are asked for.
* ``operations``: everything that is posted and has no outcome.
* ``eager``: which data may go ahead of the start.
* ``left_sync``: a synchronization whose caller has left it.
* ``finals``: outcomes and answers, which are kept for another master, and acknowledged.
* ``calls``: which joint calls end before they begin, and which wait.
* ``words``: the errors, in words.
* ``news``: what has happened to a peer lately, for whoever was removed.
"""
