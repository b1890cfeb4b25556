"""What both faces share: from what a caller asks for to what the engine does, and back.

* ``signatures``: one place for a signature: the methods of both communicators are made from it.
* ``arguments``: from what a caller asks for to a request: every argument is checked here.
* ``session``: what the blocking and the asyncio communicator share: an engine on the I/O thread.
* ``callers``: who calls, and whether anybody who calls could still go on.
* ``reports``: what a peer tells its program of itself: members, and the status.
* ``handles``: the outcome of a reduce that goes on while its caller does other things.
* ``base``: what the two communicators have in common: construction, and what needs no waiting.
* ``draining``: SIGTERM as a goodbye: this peer leaves the run before the program ends.
"""
