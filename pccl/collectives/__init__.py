"""The arithmetic of collectives, pure: who sends what when, and what happens to the numbers.

* ``layout``: how a tensor splits into chunks (one per rank) and segments (the pipeline unit).
* ``ring``: the ring schedule: what to send first and what each arrival causes.
* ``received_set``: which segments are here, as a bitmap that can travel.
* ``reductions``: adding and finishing values of each dtype.
* ``digest``: the fingerprint of a result, taken segment by segment.

A schedule never touches memory; the runtime binds it to buffers and links.
"""
