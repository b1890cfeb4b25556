"""What the members of a run vote on, and what came of it until everybody has it.

* ``ballot``: the vote over one operation.
* ``collective_ballot``: over a collective; also what becomes of it when a member is lost.
* ``sync_ballot``: over a synchronization of the shared state.
* ``open_ballots``: all that are not decided: who may ask for which.
* ``stalls``: those that cannot go on.
* ``kept``: messages, until everybody has them.
* ``finals``: what was decided, in one sequence.
"""
