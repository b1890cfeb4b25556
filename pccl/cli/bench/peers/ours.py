"""This library's side of a benchmark: one variant, and what its reduces told."""

from __future__ import annotations

import itertools

import pccl
from pccl.cli.bench.peers.values import Array
from pccl.cli.bench.variants import PLAIN, Variant


class Ours:
    """This library.

    Args:
        comm: connected.
        send: shape (n,).
        recv: where the result goes; None: in place.
        variant: how.
    """

    name = "pccl"

    def __init__(
        self,
        comm: pccl.Communicator,
        send: Array,
        recv: Array | None,
        variant: Variant = PLAIN,
    ) -> None:
        self._comm = comm
        self._variant = variant
        self._options = variant.options()
        self.input = send
        self.result = send if recv is None else recv
        self._sends = split(send, variant.tensors)
        self._recvs = split(recv, variant.tensors) if recv is not None else self._sends
        self.algorithms: set[str] = set()
        """By which results have come."""
        self.algorithm = ""
        """By which the last one has."""
        self._sent_bytes = 0
        self._raw_bytes = 0.0

    @property
    def wire_bytes_per_value(self) -> float:
        """What this peer has sent for each value that it sent, frames aside."""
        share = self._sent_bytes / self._raw_bytes if self._raw_bytes else 1.0
        return self.input.itemsize * share

    def barrier(self) -> None:
        """Wait for all peers."""
        self._comm.barrier()

    def reduce(self) -> None:
        """Add all peers' inputs."""
        for info in self._reduce():
            self.algorithm = info.algorithm
            self.algorithms.add(info.algorithm)
            self._sent_bytes += info.tx_bytes
            self._raw_bytes += info.tx_bytes * info.compression

    def _reduce(self) -> list[pccl.ReduceInfo]:
        how, options = self._variant.algorithm, self._options
        if self._variant.tensors == 1 and not self._variant.many:
            recv = self.result
            info = self._comm.all_reduce(
                self.input, recv, algorithm=how, quantization_options=options
            )
            return [info]
        if self._variant.many:
            return [
                self._comm.all_reduce_many(
                    self._sends, self._recvs, algorithm=how, quantization_options=options
                )
            ]
        handles = [
            self._comm.all_reduce_async(
                send, recv, tag=tag, algorithm=how, quantization_options=options
            )
            for tag, (send, recv) in enumerate(zip(self._sends, self._recvs, strict=True))
        ]
        return [handle.result() for handle in handles]


def split(tensor: Array, count: int) -> list[Array]:
    """Views of a tensor that are about equally long and hold all of it, in order.

    Args:
        tensor: shape (n,), n at least ``count``.
        count: how many.
    """
    ends = [len(tensor) * number // count for number in range(count + 1)]
    return [tensor[begin:end] for begin, end in itertools.pairwise(ends)]
