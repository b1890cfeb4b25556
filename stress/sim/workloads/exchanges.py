"""Exchanges and reductions of parts, also of subsets: how a process makes and checks them.

The lengths of blocks depend on seed, view, giver and taker only, so members agree on them without a
word. The expected blocks are slices of the inputs that the givers posted.

Which members make a call of a subset depends on the seed and on the last exchange of all members:
members may be in different views when they begin.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import PCCLError, TooFewPeers
from pccl.protocol.operation import Subset
from pccl.protocol.types import (
    EXCHANGES,
    REDUCTIONS_OF_PARTS,
    Collective,
    Descriptor,
    PeerId,
    ReduceOp,
)
from pccl.runtime.collective.block_operand import borrow_blocks
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import ReduceRequest
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.fold import implausible
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenarios.scenario import Slot
from pccl.stress.sim.workloads.calls import Interrupted, SimCalls
from pccl.stress.sim.workloads.inputs import draw_input

Array = npt.NDArray[Any]

_TAG = 1 << 33
_SEND = Collective.SEND_RECV
_IN_SUBSETS = "calls of subsets"


class ExchangeWork:
    """The exchanges of one process.

    Args:
        parts: shared objects of the run.
        process: the process.
        calls: makes its calls.
        rng: draws what members need not agree on.
    """

    def __init__(self, parts: RunParts, process: PeerProcess, calls: SimCalls, rng: Random) -> None:
        self._scenario, self._checkers = parts.scenario, parts.checkers
        self._process, self._calls, self._rng = process, calls, rng
        self._pairs = Random(f"{self._scenario.seed}/pairs").randint(1, 7)
        """The exclusive or of both peer ids of a pair."""
        self._subsets = Random(f"{self._scenario.seed}/subsets").choice((1, 2, 2, 3))
        """How many subsets the members form: those of equal remainders of their ids."""
        self._ring: tuple[PeerId, ...] = ()
        """Who took part in the last exchange of all members in this iteration."""

    async def run(self, iteration: int) -> None:
        """Make all exchanges of one iteration, and repeat each until it succeeds."""
        self._ring, kinds = (), self._scenario.exchanges
        if kinds[:1] == (Collective.SEND_RECV,):
            kinds = Collective.ALL_GATHER, *kinds
        of_subsets = _of_subsets(self._scenario.seed) if kinds else ()
        for kind, of_all in (*((kind, kind is not _SEND) for kind in kinds), *of_subsets):
            attempt = partial(self._attempt, kind, iteration, of_all=of_all)
            await self._calls.repeat(attempt, kind.label)

    async def _attempt(self, kind: Collective, iteration: int, *, of_all: bool) -> None:
        roster = self._process.engine.roster
        assert roster is not None
        me, ring = self._process.peer, roster.ring
        if not of_all:
            ring = self._members_with(me, ring, of_pair=kind is _SEND)
            if len(ring) < 2:
                return
        made = _Made(kind, self._scenario.seed, roster.view, ring, me, of_all=of_all)
        slot = Slot(_TAG + kind, made.given, made.data_type, made.op)
        original = draw_input(slot, self._scenario.seed, self._process.peer, iteration)
        send, recv = original.copy(), np.zeros(made.taken, original.dtype)
        if kind is Collective.ALL_GATHER and self._rng.random() < 0.5:
            recv[made.own_block] = send
            send = recv[made.own_block]
        if kind in (Collective.REDUCE, Collective.ALL_REDUCE):
            operand, buffers = borrow(send, recv), None
        else:
            operand, buffers = borrow_blocks(*made.cut(send, recv))
        tag, among = slot.tag, None
        if not of_all:
            among = Subset(made.ring, tag, int(kind is _SEND))
            tag = among.operation_tag
        asks = ReduceCall(0, tag, made.descriptor, buffers=buffers, among=among)
        request = ReduceRequest(operand, asks, timeout_s=self._calls.budget_s())
        who, engine = self._process.name, self._process.engine
        try:
            info = await self._calls.make(engine.reduce(request))
        except (PCCLError, Interrupted) as error:
            self._checkers.failed(who, send, original)
            send.view(np.uint8)[:] = recv.view(np.uint8)[:] = 0xEE  # nobody may need it any more
            self._checkers.returned(who, f"the result of a failed {kind.label}", recv)
            if isinstance(error, TooFewPeers):
                return
            raise
        self._checkers.untouched(who, send, original)
        result = info.outcome
        assert result is not None
        if result.contributors != made.ring:
            raise Violation(f"{who}: {kind.label} of {made.ring} by {result.contributors}")
        operation = InRun(self._process.run, result.operation)
        inputs = [self._checkers.input_of(operation, peer) for peer in made.ring]
        made.check(who, inputs, recv)
        if of_all:
            self._ring = made.ring
        self._checkers.done[kind.label if of_all or kind is _SEND else _IN_SUBSETS] += 1
        self._checkers.returned(who, f"the result of {result.operation}", recv)

    def _members_with(
        self, me: PeerId, present: tuple[PeerId, ...], *, of_pair: bool
    ) -> tuple[PeerId, ...]:
        """Return the present members of this peer's pair or subset, in the order of ranks."""
        if of_pair:
            chosen = [peer for peer in sorted(self._ring) if peer in (me, me ^ self._pairs)]
        else:
            chosen = [p for p in sorted(self._ring) if (p - me) % self._subsets == 0]
        chosen = [peer for peer in chosen if peer in present]
        Random(f"{self._scenario.seed}/{chosen}").shuffle(chosen)
        return tuple(chosen)


def _of_subsets(seed: int) -> list[tuple[Collective, bool]]:
    """Draw the calls that subsets make in each iteration."""
    rng = Random(f"{seed}/of subsets")
    kinds = rng.sample(sorted((EXCHANGES | REDUCTIONS_OF_PARTS) - {_SEND}), rng.randint(0, 1))
    return [(kind, False) for kind in (Collective.ALL_REDUCE, *kinds)]


class _Made:
    """One exchange in one view: what each member gives and takes."""

    def __init__(
        self,
        kind: Collective,
        seed: int,
        view: int,
        ring: tuple[PeerId, ...],
        peer: PeerId,
        *,
        of_all: bool,
    ) -> None:
        rng = Random(f"{seed}/{view}/{kind}/{() if of_all else ring}/exchange")
        self.data_type = rng.choice(tuple(DataType))
        self.op = rng.choice(tuple(ReduceOp))
        self.ring = ring
        """The members that take part."""
        self._kind, self._rank = kind, ring.index(peer)
        self._root = 0 if kind is _SEND else rng.randrange(len(ring))
        counts = kind in (*REDUCTIONS_OF_PARTS, Collective.ALL_REDUCE)
        count = rng.choice((1, len(ring), 37, 500)) if counts else 0
        self._is_equal, self._longest = rng.random() < 0.5, rng.choice((1, 9, 200, 4000))
        self._lengths = self._draw_lengths(rng, count)
        """By giver and taker."""
        self.descriptor = Descriptor.direct(
            kind, self.data_type, root=self._root, count=count, op=self.op
        )
        if kind is Collective.ALL_REDUCE:
            self._root = self._rank  # each one gets the result
            self.descriptor = Descriptor(self.data_type, self.op, count)

    def _draw_lengths(self, rng: Random, count: int) -> list[list[int]]:
        size, kind = len(self.ring), self._kind
        each = rng.randint(1, self._longest)
        if kind is Collective.REDUCE_SCATTER:
            return [[count // size + (rank < count % size) for rank in range(size)]] * size
        if kind is Collective.ALL_REDUCE:
            return [[count] * size] * size
        if kind is Collective.REDUCE:
            return [[count if rank == self._root else 0 for rank in range(size)]] * size
        lengths: list[list[int]] = []
        for giver in range(size):
            row = [each if self._is_equal else rng.randint(0, self._longest) for _ in self.ring]
            if kind is Collective.ALL_GATHER:
                row = row[:1] * size
            elif kind is Collective.GATHER:
                row = [row[0] if taker == self._root else 0 for taker in range(size)]
            elif kind is Collective.SCATTER and giver != self._root:
                row = [0] * size
            elif kind is Collective.SEND_RECV:
                row = [row[0] if giver == self._root != taker else 0 for taker in range(size)]
            lengths.append(row)
        return lengths

    @property
    def given(self) -> int:
        """Number of elements of the own input."""
        if self._kind in (Collective.REDUCE, Collective.ALL_REDUCE):
            return self._lengths[self._rank][self._root]
        row = self._lengths[self._rank]
        return row[0] if self._kind is Collective.ALL_GATHER else sum(row)

    @property
    def taken(self) -> int:
        """Number of elements of the own result."""
        if self._kind in (Collective.REDUCE, Collective.ALL_REDUCE):
            return self.given  # without effect, except on the root
        if self._kind is Collective.REDUCE_SCATTER:
            return self._lengths[0][self._rank]
        return sum(row[self._rank] for row in self._lengths)

    @property
    def own_block(self) -> slice:
        """The own values in the result of an all-gather."""
        start = sum(row[0] for row in self._lengths[: self._rank])
        return slice(start, start + self._lengths[self._rank][0])

    def cut(self, send: Array, recv: Array) -> tuple[Any, Any]:
        """Return both buffers as a caller gives them: a tensor for each member, or one, or None."""
        gives, takes = self._lengths[self._rank], [row[self._rank] for row in self._lengths]
        is_root = self._rank == self._root
        match self._kind:
            case Collective.ALL_GATHER:
                return send, self._blocks(recv, takes)
            case Collective.GATHER:
                return send, self._blocks(recv, takes) if is_root else None
            case Collective.SCATTER:
                return self._blocks(send, gives) if is_root else None, recv
            case Collective.SEND_RECV:
                return (send, None) if is_root else (None, recv)
            case Collective.ALL_TO_ALL:
                return self._blocks(send, gives), self._blocks(recv, takes)
            case _:
                return send, recv

    def _blocks(self, values: Array, lengths: list[int]) -> Array | list[Array]:
        if self._is_equal:
            return values
        return np.split(values, np.cumsum(lengths)[:-1])

    def check(self, who: str, inputs: list[Array], recv: Array) -> None:
        """Check the own result, from the inputs of all members in the order of ranks."""
        if self._kind in (Collective.REDUCE, Collective.ALL_REDUCE):
            if self._rank == self._root and implausible(recv, inputs, self.op):
                raise Violation(f"{who}: wrong result of {self.descriptor}")
            return
        blocks: list[Array] = []
        for values, lengths in zip(inputs, self._lengths, strict=True):
            start = 0 if self._kind is Collective.ALL_GATHER else sum(lengths[: self._rank])
            blocks.append(values[start : start + lengths[self._rank]])
        if self._kind is Collective.REDUCE_SCATTER:
            if len(recv) and implausible(recv, blocks, self.op):
                raise Violation(f"{who}: wrong result of {self.descriptor}")
        elif recv.tobytes() != b"".join(block.tobytes() for block in blocks):
            raise Violation(f"{who}: wrong blocks from {self.descriptor}")
