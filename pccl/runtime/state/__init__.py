"""Shared state: served, compared and fetched.

* ``memory``: where the bytes of a shared state are, and how far they are known.
* ``post``: frames of shared state to other peers, on behalf of one operation.
* ``giver``: what one peer gives of a shared state to those who ask.
* ``intake``: pieces of shared state on their way in, each read straight to where it belongs.
* ``maps``: maps of other members' shared states: asked for, and compared with the own one.
* ``session``: one shared state that is lent to an operation: served, compared, fetched.
* ``sync``: one call about shared state, from hashing to the last byte in place.
* ``desk``: everything that a peer's engine does about shared state.
* ``exchange``: everything that this peer gives and takes of shared state.
* ``exhibit``: a shared state that newcomers may fetch while nobody waits for them.
* ``prefetch``: a newcomer fetches what its group holds while the members go on working.
* ``running_prefetch``: what a newcomer does about its state until it is admitted.
* ``results``: what reductions have come to, shown to newcomers who replay them.
* ``replay``: a newcomer does to its state what the members do to theirs.
* ``progress``: how far a fetch of shared state is, for people.
"""
