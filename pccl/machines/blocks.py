"""The lengths of blocks, from a caller's buffers.

All-gather, gather, scatter and all-to-all differ only in these lengths. Each member derives from
its buffers how many elements it gives to each rank, and how many it takes from each.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol.operation import EXCHANGE_MEMBERS_MAX, BlockLengths
from pccl.protocol.types import Collective, Descriptor


@dataclass(frozen=True, slots=True)
class BufferLengths:
    """The buffers of one call, as lengths in elements."""

    send: tuple[int, ...]
    """Of each tensor in the input; empty: this member gives nothing."""
    recv: tuple[int, ...]
    """Of each tensor in the result; empty: this member gets nothing."""
    inside: int | None = None
    """Where the input begins in the result, if it is a part of that memory."""


def blocks_of(
    descriptor: Descriptor, given: BufferLengths, rank: int, world_size: int
) -> BlockLengths:
    """Return the lengths of the blocks that follow from a member's buffers.

    Raises:
        ValueError: the buffers do not fit the group; the message says what to pass.
    """
    collective, root = descriptor.collective, descriptor.root
    if world_size > EXCHANGE_MEMBERS_MAX:
        raise ValueError(
            f"{collective.label} is for groups of up to {EXCHANGE_MEMBERS_MAX} members, and this "
            f"one has {world_size}; use several groups"
        )
    nothing = (0,) * world_size
    match collective:
        case Collective.ALL_GATHER:
            gives = (_only(given.send, "send"),) * world_size
            takes = _by_rank(given.recv, "recv", world_size)
        case Collective.GATHER:
            gives = _at(root, _only(given.send, "send"), world_size)
            takes = _of_root(given.recv, "recv", root, rank, world_size)
        case Collective.SCATTER:
            gives = _of_root(given.send, "send", root, rank, world_size)
            takes = _at(root, _only(given.recv, "recv"), world_size)
        case Collective.ALL_TO_ALL:
            gives = _by_rank(given.send, "send", world_size)
            takes = _by_rank(given.recv, "recv", world_size)
        case Collective.SEND_RECV:  # the pair is the group
            gives = _at(1 - rank, sum(given.send), world_size)
            takes = _at(1 - rank, sum(given.recv), world_size)
        case Collective.REDUCE_SCATTER:
            own, part = _part(descriptor.count, rank, world_size), _only(given.recv, "recv")
            if part != own:
                raise ValueError(
                    f"recv has {part} elements, but the part of rank {rank} of {world_size} has "
                    f"{own}; the first ranks get one more if the members can't share equally"
                )
            return BlockLengths(nothing, nothing)
        case _:
            return BlockLengths(nothing, nothing)
    if gives[rank] != takes[rank]:
        raise ValueError(
            f"send has {gives[rank]} elements for this member, rank {rank}, but recv has "
            f"{takes[rank]}; make them equal"
        )
    if given.inside is not None and given.inside != sum(takes[:rank]):
        raise ValueError(
            f"send overlaps recv, but is not the block of rank {rank} in it; pass that block, or "
            "separate memory"
        )
    return BlockLengths(gives, takes)


def _only(lengths: tuple[int, ...], name: str) -> int:
    if len(lengths) != 1:
        raise ValueError(f"{name} must be one tensor, not {len(lengths)}")
    return lengths[0]


def _at(root: int, length: int, world_size: int) -> tuple[int, ...]:
    return tuple(length if rank == root else 0 for rank in range(world_size))


def _of_root(
    lengths: tuple[int, ...], name: str, root: int, rank: int, world_size: int
) -> tuple[int, ...]:
    if rank == root:
        return _by_rank(lengths, name, world_size)
    if lengths:
        raise ValueError(f"only the root, rank {root}, gives {name}, and this is rank {rank}")
    return (0,) * world_size


def _by_rank(lengths: tuple[int, ...], name: str, world_size: int) -> tuple[int, ...]:
    """Return the length of each rank's block: of its tensor, or an equal part of the only one."""
    if len(lengths) == world_size:
        return lengths
    if len(lengths) != 1:
        raise ValueError(
            f"{name} must be {world_size} tensors, one for each member, or one for all, not "
            f"{len(lengths)} tensors; read world_size again"
        )
    each, rest = divmod(lengths[0], world_size)
    if rest:
        raise ValueError(
            f"{name} has {lengths[0]} elements, which {world_size} members can't share equally; "
            "pass a list with a tensor for each member, or read world_size again"
        )
    return (each,) * world_size


def _part(count: int, rank: int, world_size: int) -> int:
    each, longer = divmod(count, world_size)
    return each + (rank < longer)
