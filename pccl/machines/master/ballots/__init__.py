"""The votes of members over operations, and the outcomes, kept until all members have them.

* ``ballot``: the vote over one operation.
* ``collective_ballot``: the vote over a collective, also after a member is lost.
* ``claimed_blocks``: what the members of an exchange say about the lengths of their blocks.
* ``flows``: how far the data of an operation has come between its members.
* ``arrivals``: when members make their calls, and how long a quorum waits for late ones.
* ``sync_ballot``: the vote over a synchronization of the shared state.
* ``open_ballots``: all undecided operations, and which peer may request which.
* ``norms``: the guard of weighted averages, which judges contributions by their norms.
* ``stalls``: finds operations that cannot continue.
* ``kept``: messages that some members have not acknowledged.
* ``finals``: all outcomes and answers, in one sequence.
"""
