"""Publishes versions of shared state, and reads them from outside the run.

* ``copies``: copies of states, and the deltas between them.
* ``exchange``: the links to readers: what this process serves on them, and what it fetches.
* ``fetch``: the download of one published state.
* ``publisher``: the part of a member: copies a state, and serves it.
* ``reader``: the engine of a reader.
"""
