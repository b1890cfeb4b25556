"""Schedules, pure: what each rank of a collective sends, and what each arrival causes.

* ``chain``: the interface of a chain's schedule, as one rank sees it.
* ``ring``: ring all-reduce: reduce-scatter, then all-gather, pipelined by segment.
* ``broadcast``: a chain in ring order that starts at the root.
* ``direct``: mesh and star: contributions to owners, results from owners; also parts of these.
* ``gather``: all-reduce of sparse contributions, which each rank adds up.
* ``exchange``: all-gather, gather, scatter and all-to-all: blocks from givers to takers.
* ``plan``: the schedule of an operation. All members derive the same one.
"""
