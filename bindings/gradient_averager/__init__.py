"""Classic data parallelism across peers: the gradients of every step are averaged.

* ``averager``: hooks on the parameters, the membership, and the step.
* ``averageable``: checks which gradients can be averaged.
* ``bucket_plan``: decides which gradients are reduced together. Pure.
* ``buckets``: buckets of gradients that are contiguous in host memory.
* ``leaves``: converts the numbers in nested dictionaries and lists to a list, and back. Pure.
* ``reductions``: the reduces of one step, until each has an outcome.
* ``step_samples``: the samples of each step, with an ``ElasticSampler``.
* ``replica``: the model and optimizer as a shared state, bit-identical on all peers.

It needs links that are fast compared to a step; otherwise use DiLoCo, which communicates hundreds
of times less. Programs use only :class:`GradientAverager`.
"""

from pccl.bindings.gradient_averager.averager import GradientAverager

__all__ = ["GradientAverager"]
