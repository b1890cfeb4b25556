"""What runs in the processes that are measured.

* ``words``: what ``pccl bench`` tells its processes to do, and what they report.
* ``peer``: one peer process of ``pccl bench allreduce``: plays the rounds and reports the times.
* ``rounds``: rounds of a benchmark: fill, meet, reduce with a clock beside it, check.
* ``ours``: this library's side of a benchmark: one variant, and what its reduces told.
* ``gloo``: the other side of a comparison: Gloo, as it comes with torch. Only this module imports
  torch.
* ``values``: the values that a benchmark reduces, and whether the results are right.
* ``samples``: random values for results that are not exact: their error, and what it must not
  exceed.
* ``bounds``: how far a quantized sum may be from the exact one: the formats' bounds, for given
  values. Pure.
* ``memory``: how much memory this process has and has had at once, as the system counts it.
* ``bandwidth``: how fast one thread of this machine copies, adds and hashes: a program that ``pccl
  bench`` runs.
* ``agreement``: peers of one run tell each other what they know: by its own collectives, without
  another channel.
"""
