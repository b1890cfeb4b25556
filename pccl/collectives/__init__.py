"""Collectives, pure: which rank sends which segment when, and the arithmetic.

* ``layout``: how a tensor splits: into one chunk per rank, and each chunk into segments.
* ``route``: the numbered segments that one rank sends to another in one collective.
* ``schedules``: what each rank of a collective sends, and what each arrival causes.
* ``bitmap``: a bitmap of the segments that have arrived, for the sender after a lost lane.
* ``reductions``: combining contributions: the arithmetic of every dtype and operation, in place.
* ``weighting``: the factors and the divisor of a weighted average.
* ``norms``: the norm of a contribution, for the guard of a weighted average.
* ``digest``: the digest of a result: hashes of its segments, in the order of their position.
* ``residual``: the rounding error of one tensor, which error feedback carries from one operation to
  the next.
* ``quantization``: wire formats: they encode values as fewer bytes, block by block, and decode
  them.
"""
