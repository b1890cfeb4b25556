"""Checks the arguments of exchanges and of reductions of parts, and makes requests from them.

The lengths of the buffers depend on the group, so the peer's machine checks those when the call
begins.
"""

from __future__ import annotations

from dataclasses import replace

from pccl.checks import TAG_MAX, check_flag, check_member, check_range, check_timeout
from pccl.machines.peer.events import ReduceCall
from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.operation import Subset
from pccl.protocol.types import (
    Collective,
    Descriptor,
    PeerId,
    ReduceOp,
)
from pccl.runtime.collective.block_operand import borrow_blocks
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import ReduceRequest


def all_gather_request(
    send: object, recv: object, *, tag: int = 0, timeout_s: float | None = None
) -> ReduceRequest:
    """Check the arguments of ``all_gather``.

    Raises:
        TypeError, ValueError: an argument is wrong. The functions below raise these errors too.
    """
    return _exchange(Collective.ALL_GATHER, send, recv, tag, timeout_s)


def gather_request(
    send: object,
    recv: object | None = None,
    *,
    root: int = 0,
    tag: int = 0,
    timeout_s: float | None = None,
) -> ReduceRequest:
    """Check the arguments of ``gather``."""
    return _exchange(Collective.GATHER, send, recv, tag, timeout_s, root)


def scatter_request(
    send: object | None,
    recv: object,
    *,
    root: int = 0,
    tag: int = 0,
    timeout_s: float | None = None,
) -> ReduceRequest:
    """Check the arguments of ``scatter``."""
    return _exchange(Collective.SCATTER, send, recv, tag, timeout_s, root)


def all_to_all_request(
    send: object, recv: object, *, tag: int = 0, timeout_s: float | None = None
) -> ReduceRequest:
    """Check the arguments of ``all_to_all``."""
    return _exchange(Collective.ALL_TO_ALL, send, recv, tag, timeout_s)


def send_request(
    tensor: object, to: int, *, tag: int = 0, timeout_s: float | None = None
) -> tuple[ReduceRequest, int]:
    """Check the arguments of ``send``; return the rank of the other member, too."""
    return _to_other(tensor, None, check_range("to", to, 0, PEERS_MAX - 1), tag, timeout_s)


def recv_request(
    tensor: object, source: int, *, tag: int = 0, timeout_s: float | None = None
) -> tuple[ReduceRequest, int]:
    """Check the arguments of ``recv``; return the rank of the other member, too."""
    rank = check_range("source", source, 0, PEERS_MAX - 1)
    return _to_other(None, tensor, rank, tag, timeout_s)


def reduce_scatter_request(
    send: object,
    recv: object,
    *,
    op: ReduceOp | str = ReduceOp.SUM,
    tag: int = 0,
    timeout_s: float | None = None,
) -> ReduceRequest:
    """Check the arguments of ``reduce_scatter``."""
    operation = check_member("op", op, ReduceOp)
    operand, buffers = borrow_blocks(send, recv)
    if not operand.count:
        raise ValueError("send has no elements; pass at least one")
    if buffers.inside is not None:
        raise ValueError("send and recv overlap; pass separate ones")
    descriptor = Descriptor.direct(
        Collective.REDUCE_SCATTER, operand.data_type, count=operand.count, op=operation
    )
    asks = ReduceCall(0, check_range("tag", tag, 0, TAG_MAX), descriptor, buffers=buffers)
    return ReduceRequest(operand, asks, timeout_s=check_timeout(timeout_s))


def root_reduce_request(
    send: object,
    recv: object | None = None,
    *,
    op: ReduceOp | str = ReduceOp.SUM,
    root: int = 0,
    tag: int = 0,
    retry: bool = False,
    timeout_s: float | None = None,
) -> ReduceRequest:
    """Check the arguments of ``reduce``."""
    operation = check_member("op", op, ReduceOp)
    rank = check_range("root", root, 0, PEERS_MAX - 1)
    operand = borrow(send, recv)
    descriptor = Descriptor.direct(
        Collective.REDUCE, operand.data_type, root=rank, count=operand.count, op=operation
    )
    asks = ReduceCall(0, check_range("tag", tag, 0, TAG_MAX), descriptor)
    retries, limit_s = check_flag("retry", retry), check_timeout(timeout_s)
    return ReduceRequest(operand, asks, retry=retries, timeout_s=limit_s)


def _exchange(
    collective: Collective,
    send: object | None,
    recv: object | None,
    tag: int,
    timeout_s: float | None,
    root: int = 0,
) -> ReduceRequest:
    rank = check_range("root", root, 0, PEERS_MAX - 1)
    operand, buffers = borrow_blocks(send, recv)
    if buffers.inside is not None and collective is not Collective.ALL_GATHER:
        raise ValueError("send and recv overlap; pass separate ones")
    descriptor = Descriptor.direct(collective, operand.data_type, root=rank)
    asks = ReduceCall(0, check_range("tag", tag, 0, TAG_MAX), descriptor, buffers=buffers)
    return ReduceRequest(operand, asks, timeout_s=check_timeout(timeout_s))


def _to_other(
    send: object | None, recv: object | None, partner: int, tag: int, timeout_s: float | None
) -> tuple[ReduceRequest, int]:
    operand, buffers = borrow_blocks(send, recv)
    descriptor = Descriptor.direct(Collective.SEND_RECV, operand.data_type)
    asks = ReduceCall(0, check_range("tag", tag, 0, TAG_MAX), descriptor, buffers=buffers)
    return ReduceRequest(operand, asks, timeout_s=check_timeout(timeout_s)), partner


def addressed(
    request: ReduceRequest, partner: int, ring: tuple[PeerId, ...], own: int, *, within: int
) -> ReduceRequest:
    """Return the request of a send or a receive with the members that take part.

    Args:
        request: the request.
        partner: rank of the other member.
        ring: ids of the members that have ranks.
        own: rank of this peer.
        within: see ``Subset``.

    Raises:
        ValueError: there is no other member with that rank, although this peer is not alone.
    """
    is_alone = len(ring) < 2
    if not is_alone and (partner == own or partner >= len(ring)):
        raise ValueError(
            f"the rank must be that of another member, from 0 to {len(ring) - 1} and not {own}, "
            f"but it is {partner}"
        )
    peers = ring if is_alone else (ring[own], ring[partner])
    buffers = request.asks.buffers
    is_source = buffers is not None and bool(buffers.send)
    return with_members(request, peers if is_source else peers[::-1], within)


def with_members(
    request: ReduceRequest, peers: tuple[PeerId, ...], within: int = 0
) -> ReduceRequest:
    """Return the same request for these members only."""
    among = Subset(peers, request.asks.tag, within)
    asks = replace(request.asks, tag=among.operation_tag, among=among, ring=())
    return replace(request, asks=asks)
