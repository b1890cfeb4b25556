"""The caller's buffers of an exchange, or of a reduction of parts: checked, then borrowed.

Their lengths depend on the group; the peer's machine checks those.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from pccl.machines.blocks import BufferLengths
from pccl.runtime.collective.memory import Array, Memory, clash
from pccl.runtime.collective.operand import DATA_TYPES, Operand, flat_array


def borrow_blocks(send: object | None, recv: object | None) -> tuple[Operand, BufferLengths]:
    """Check the buffers of an exchange, or of a reduction of parts.

    Args:
        send: a tensor as in :func:`borrow`, or a list of tensors, one for each member; None: this
            member gives nothing. Tensors may be empty.
        recv: the same for the result; None: this member gets nothing.

    Raises:
        TypeError, ValueError: as in :func:`borrow`; or there is no tensor, dtypes differ, or two
            overlap. The input may be a part of one tensor of the result.
    """
    sends, recvs = _blocks(send, "send"), _blocks(recv, "recv")
    named = [*sends.items(), *recvs.items()]
    if not named:
        raise ValueError("neither send nor recv has a tensor; pass at least one")
    first_name, first = named[0]
    for name, array in named:
        if array.dtype != first.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype}, {first_name} has {first.dtype}; make them equal"
            )
    for name, array in recvs.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only; pass a writable array, for example a copy()")
    empty = np.empty(0, first.dtype)
    source = Memory([part for part in sends.values() if part.size] or [empty])
    target = Memory([part for part in recvs.values() if part.size] or [empty])
    inside = _place_in(source, target)
    operand = Operand(source, target, source, DATA_TYPES[first.dtype], in_place=False)
    if inside is not None:
        operand.ranges = operand.ranges[: len(target.parts)]
    names = [name for name, part in (*recvs.items(), *sends.items()) if part.size]
    ranges = (one for one in operand.ranges if one[0] < one[1])
    found = clash((*one[:3], name) for one, name in zip(ranges, names, strict=False))
    if found is not None:
        raise ValueError(f"{found[0]} and {found[1]} overlap; pass separate ones")
    given = BufferLengths(
        tuple(part.size for part in sends.values()),
        tuple(part.size for part in recvs.values()),
        inside,
    )
    return operand, given


def _blocks(given: object | None, name: str) -> dict[str, Array]:
    """Return the tensors of an argument as arrays of shape (n,), by their names in messages."""
    if given is None:
        return {}
    if not isinstance(given, list | tuple):
        return {name: flat_array(given, name)}
    listed = cast("list[object] | tuple[object, ...]", given)
    return {f"{name}[{n}]": flat_array(one, f"{name}[{n}]") for n, one in enumerate(listed)}


def _place_in(source: Memory, target: Memory) -> int | None:
    """Return at which element of the result the input lies, if one tensor there has all of it."""
    if len(source.parts) > 1 or not source.size:
        return None
    start, end = source.addresses[0], source.addresses[0] + source.nbytes
    at = 0
    for address, part in zip(target.addresses, target.parts, strict=True):
        where, rest = divmod(start - address, source.dtype.itemsize)
        if address <= start and end <= address + part.nbytes and not rest:
            return at + where
        at += part.size
    return None
