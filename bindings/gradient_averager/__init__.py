"""Classic data parallelism across peers: the gradients of every step are averaged.

For links that are fast compared to a step; where they are not, DiLoCo communicates hundreds of
times less. :class:`GradientAverager` is all there is to use. Its parts:

- ``bucket_plan``: which gradients travel together (pure);
- ``buckets``: their memory, on the host;
- ``reductions``: averages in flight, until every one of them has an outcome;
- ``replica``: parameters, optimizer state and step count as one shared state, for newcomers;
- ``leaves``: the numbers in nested dictionaries, as one list;
- ``averager``: hooks, membership and the step.
"""

from pccl.bindings.gradient_averager.averager import GradientAverager

__all__ = ["GradientAverager"]
