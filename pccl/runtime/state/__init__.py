"""Shared state: served, compared and fetched.

* ``memory``: where the bytes of a shared state are, and how far they are known.
* ``frames``: frames of shared state: sent and checked.
* ``upload``: what one peer gives of a shared state to those who ask.
* ``receiver``: carries out what a download decides, and tells it what comes.
* ``comparison``: finds out how the own state differs from that of another member.
* ``session``: one shared state that takes part in an operation: uploaded, compared, fetched.
* ``sync``: one call about shared state, from hashing to the last byte in place.
* ``service``: everything that a peer's engine does about shared state.
* ``exchange``: everything that this peer gives and takes of shared state.
* ``snapshot``: a shared state that newcomers may fetch while nobody waits for them.
* ``prefetch``: a newcomer fetches what its group holds while the members go on working.
* ``running_prefetch``: what a newcomer does about its state until it is admitted.
* ``results``: what reductions have come to, shown to newcomers who replay them.
* ``replay``: a newcomer does to its state what the members do to theirs.
* ``progress``: how far a fetch of shared state is, for people.
"""
