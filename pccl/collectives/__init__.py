"""The arithmetic of collectives, pure: who sends what when, and what happens to the numbers.

* ``layout``: how a tensor splits into chunks (one per rank) and segments (the pipeline unit).
* ``schedule``: what every schedule says: what to send first and what each arrival causes.
* ``ring``, ``broadcast``: the schedules; ``plan`` picks the one for what was asked for.
* ``received_set``: which segments are here, as a bitmap that can travel.
* ``reductions``: combining values of each dtype, and finishing averages.
* ``quantization``: wire formats; ``residual``: what they left out of a tensor.
* ``digest``: the fingerprint of a result, taken segment by segment.

A schedule never touches memory; the runtime binds it to buffers and links.
"""
