"""What the members of a run vote on, and what came of it until everybody has it.

* ``ballot``: the vote over one operation.
* ``collective_ballot``: over a collective.
* ``sync_ballot``: over a synchronization of the shared state.
* ``kept``: what was decided, until everybody has it.
"""
