"""The tensors of a shared state in host memory, and the pieces fetched for it.

* ``state_memory``: the bytes of each tensor of a shared state, in memory of this host.
* ``state_hashing``: updates the digests of a state, and stops when the communicator closes.
* ``staging``: memory or a file that holds fetched pieces until all have arrived.
* ``fetched``: pieces that were fetched and verified, but are not in the tensors yet.
"""
