"""Classic data parallelism across peers: the gradients of every step are averaged.

* ``averager``: hooks on the parameters, the membership, and the step.
* ``averageable``: which gradients can be averaged; of others, why not and what to do.
* ``bucket_plan``: which gradients are reduced together. Pure: numbers in, numbers out.
* ``buckets``: the memory of a bucket: gradients that lie one behind the other on the host.
* ``leaves``: the numbers in nested dictionaries and lists, as one list and back. Pure.
* ``reductions``: averages in flight, until every one of them has an outcome.
* ``replica``: what all peers have, bit for bit the same, as one shared state that a newcomer takes
  over.

For links that are fast compared to a step; where they are not, DiLoCo communicates hundreds of
times less. :class:`GradientAverager` is all there is to use.
"""

from pccl.bindings.gradient_averager.averager import GradientAverager

__all__ = ["GradientAverager"]
