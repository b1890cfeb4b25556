"""What both faces share: from what a caller asks for to what the engine does, and back.

* ``session``: what the blocking and the asyncio communicator share: an engine on the I/O thread.
* ``arguments``: from what a caller asks for to what the engine does: every argument is checked
  here.
* ``callers``: who calls, and whether anybody who calls could still go on.
* ``reports``: what calls tell their callers.
* ``handles``: the outcome of a reduce that goes on while its caller does other things.
* ``base``: what the two communicators have in common: construction, and what needs no waiting.
* ``draining``: SIGTERM as a goodbye: this peer leaves the run before the program ends.
"""
