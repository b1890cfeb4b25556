"""Where the bytes of a shared state are, and how far they are known.

* ``state_memory``: the bytes of a shared state, tensor by tensor, in memory of this host.
* ``state_hashing``: brings the digests of a state up to date, and stops when it has to.
* ``staging``: where pieces are that were fetched, until all of them are there.
* ``fetched``: pieces of a shared state that were fetched and verified, and are not in place yet.
"""
