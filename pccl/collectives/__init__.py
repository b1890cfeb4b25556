"""Collectives, pure: who sends what when, and the arithmetic.

* ``layout``: how a tensor splits: into one chunk per rank, and each chunk into segments.
* ``route``: what one rank sends to another in one collective: segments, numbered.
* ``schedule``: what a chain tells the runtime: who sends what when, as one rank sees it.
* ``ring``: ring all-reduce as a pure schedule: reduce-scatter, then all-gather, pipelined by
  segment.
* ``direct``: mesh and star all-reduce as one pure schedule: contributions to owners, results from
  owners.
* ``broadcast``: broadcast as a pure schedule: a chain in ring order that starts at the root.
* ``plan``: which schedule carries out what was asked for. All members derive the same one.
* ``bitmap``: which of the expected segments are here, as it travels after a lane was lost.
* ``reductions``: combining contributions: the arithmetic of every dtype and operation, in place.
* ``weighting``: weighted averages: what becomes of contributions that count unequally.
* ``digest``: the fingerprint of a result: hashes of its segments, in the order of their position.
* ``residual``: what quantization left out of one tensor, on its way from one operation into the
  next.
* ``quantization``: wire formats: values become fewer bytes, block by block, and bytes become
  values.
"""
