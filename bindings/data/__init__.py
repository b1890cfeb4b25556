"""Samples for peers that may join and leave: each sample once, and none lost.

* ``sample_ledger``: the samples that are done, and the leases of the peers. Pure.
* ``order``: the order of samples, without memory for each sample. Pure.
* ``reader``: which positions of its lease a peer has read, and trained with. Pure.
* ``sampler``: the batches of one peer.

Programs use only :class:`ElasticSampler`.
"""

from pccl.bindings.data.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
