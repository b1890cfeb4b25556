"""torch's collectives through a ``RunGroup``, beside what they mean."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import pccl
from pccl.bindings.process_group.group import RunGroup
from pccl.bindings.process_group.untyped import dist
from tests.integration.process_group.conftest import Crew, options

SIZE = 3
Crews = Callable[..., Crew]


def own(rank: int, length: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(length).add(10 * rank).to(dtype)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("SUM", 33.0), ("AVG", 11.0), ("PRODUCT", 1.0 * 11 * 21), ("MIN", 1.0), ("MAX", 21.0)],
)
def test_all_reduce(crew_of: Crews, op: str, expected: float) -> None:
    def reduce(rank: int, group: RunGroup) -> Tensor:
        tensor = own(rank)
        work = group.allreduce(
            [tensor], options("AllreduceOptions", reduceOp=getattr(dist.ReduceOp, op))
        )
        assert work.wait()
        return tensor

    for tensor in crew_of(SIZE).each(reduce):
        assert tensor[1] == expected


def test_other_operations_and_dtypes_are_refused(crew_of: Crews) -> None:
    def refuse(rank: int, group: RunGroup) -> None:
        with pytest.raises(ValueError, match="not with"):
            group.allreduce([own(0)], options("AllreduceOptions", reduceOp=dist.ReduceOp.BAND))
        with pytest.raises(ValueError, match=r"cannot reduce torch\.bool"):
            group.allreduce([own(0, dtype=torch.bool)], options("AllreduceOptions"))
        with pytest.raises(NotImplementedError, match="src="):
            group.recv_anysource([own(0)], 0)

    crew_of(SIZE).each(refuse)


def test_strange_memory(crew_of: Crews) -> None:
    """Strided tensors, conjugate views, complex numbers, and tensors without a dimension."""

    def reduce(rank: int, group: RunGroup) -> list[Tensor]:
        strided = own(rank, 12).view(3, 4).t()
        complex_ = torch.complex(own(rank), -own(rank))
        conjugate = torch.complex(own(rank), own(rank)).conj()
        scalar = torch.tensor(float(rank))
        tensors = [strided, complex_, conjugate.imag, scalar]
        group.allreduce_coalesced(tensors, options("AllreduceCoalescedOptions")).wait()
        return tensors

    total = own(0, 12) + own(1, 12) + own(2, 12)
    for strided, complex_, negative, scalar in crew_of(SIZE).each(reduce):
        assert torch.equal(strided, total.view(3, 4).t())
        assert torch.equal(complex_, torch.complex(total[:4], -total[:4]))
        assert torch.equal(negative, -total[:4])
        assert scalar == 3


def test_memory_that_elements_share(crew_of: Crews) -> None:
    """It gives values, and takes no result."""

    def call(rank: int, group: RunGroup) -> tuple[Tensor, float]:
        shared, each = torch.full((1,), 1.0 + rank).expand(2), [torch.zeros(2) for _ in range(SIZE)]
        from_first = options("BroadcastOptions", rootRank=0)
        for refused in (
            partial(group.allreduce, [shared]),
            partial(group.broadcast, [shared], from_first),
            partial(group.recv, [shared], 0, 0),
        ):
            with pytest.raises(ValueError, match="share memory"):
                refused()
        group.allgather([each], [shared], options("AllgatherOptions")).wait()
        total = shared.clone() if rank == 0 else shared
        group.reduce([total], options("ReduceOptions", rootRank=0)).wait()
        return torch.cat(each), total[1].item()

    gathered = torch.tensor([1.0, 1, 2, 2, 3, 3])
    for rank, (each, total) in enumerate(crew_of(SIZE).each(call)):
        assert torch.equal(each, gathered)
        assert total == (6 if rank == 0 else 1 + rank)


def test_tensors_without_elements(crew_of: Crews) -> None:
    def call(rank: int, group: RunGroup) -> bool:
        empty = torch.zeros(0)
        works: list[Any] = [
            group.allreduce([empty]),
            group.broadcast([empty], options("BroadcastOptions", rootRank=1)),
            group.reduce([empty], options("ReduceOptions", rootRank=0)),
            group.reduce_scatter_single(empty, empty, options("ReduceScatterOptions")),
            group.all_gather_single(empty, empty, options("AllgatherOptions")),
        ]
        return all(work.wait() and work.get_future().wait() is not None for work in works)

    assert crew_of(SIZE).each(call) == [True] * SIZE


def test_reduce_and_reduce_scatter(crew_of: Crews) -> None:
    def reduce(rank: int, group: RunGroup) -> tuple[Tensor, Tensor, Tensor]:
        tensor, part, other = own(rank), torch.zeros(2), torch.zeros(2)
        group.reduce([tensor], options("ReduceOptions", rootRank=1)).wait()
        group.reduce_scatter_single(part, own(rank, 6), options("ReduceScatterOptions")).wait()
        rows = [list(torch.split(own(rank, 6), 2))]
        group.reduce_scatter([other], rows, options("ReduceScatterOptions")).wait()
        return tensor, part, other

    for rank, (tensor, part, other) in enumerate(crew_of(SIZE).each(reduce)):
        assert torch.equal(tensor, own(0) + own(1) + own(2) if rank == 1 else own(rank))
        total = own(0, 6) + own(1, 6) + own(2, 6)
        assert torch.equal(part, total[2 * rank : 2 * rank + 2])
        assert torch.equal(other, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.int64])
def test_exchanges(crew_of: Crews, dtype: torch.dtype) -> None:
    def exchange(rank: int, group: RunGroup) -> dict[str, Any]:
        each = [torch.zeros(4, dtype=dtype) for _ in range(SIZE)]
        flat = torch.zeros(4 * SIZE, dtype=dtype)
        copy, part = own(rank, dtype=dtype), torch.zeros(4, dtype=dtype)
        rooted = [[torch.zeros(4, dtype=dtype) for _ in range(SIZE)]] if rank == 2 else []
        given = [[own(to, dtype=dtype) for to in range(SIZE)]] if rank == 1 else []
        swapped = torch.zeros(SIZE, dtype=dtype)
        group.allgather([each], [own(rank, dtype=dtype)], options("AllgatherOptions")).wait()
        group.all_gather_single(flat, own(rank, dtype=dtype), options("AllgatherOptions")).wait()
        group.broadcast([copy], options("BroadcastOptions", rootRank=1)).wait()
        group.gather(rooted, [own(rank, dtype=dtype)], options("GatherOptions", rootRank=2)).wait()
        group.scatter([part], given, options("ScatterOptions", rootRank=1)).wait()
        group.all_to_all_single(
            swapped, own(rank, SIZE, dtype), [], [], options("AllToAllOptions")
        ).wait()
        return {
            "each": each, "flat": flat, "copy": copy, "part": part,
            "rooted": rooted, "swapped": swapped,
        }  # fmt: skip

    all_own = [own(rank, dtype=dtype) for rank in range(SIZE)]
    for rank, got in enumerate(crew_of(SIZE).each(exchange)):
        assert all(map(torch.equal, got["each"], all_own))
        assert torch.equal(got["flat"], torch.cat(all_own))
        assert torch.equal(got["copy"], all_own[1])
        assert torch.equal(got["part"], all_own[rank])
        assert not got["rooted"] or all(map(torch.equal, got["rooted"][0], all_own))
        assert torch.equal(got["swapped"], torch.stack([one[rank] for one in all_own]))


def test_uneven_all_to_all(crew_of: Crews) -> None:
    """Rank r gives 2 rows to rank 0, and r to each other rank."""

    def exchange(rank: int, group: RunGroup) -> Tensor:
        gives = [2] + [rank] * (SIZE - 1)
        takes = [2] * SIZE if rank == 0 else list(range(SIZE))
        source = torch.full((sum(gives), 3), float(rank))
        output = torch.zeros(sum(takes), 3)
        group.all_to_all_single(output, source, takes, gives, options("AllToAllOptions")).wait()
        return output

    first, *others = crew_of(SIZE).each(exchange)
    assert first[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert all(other[:, 2].tolist() == [1, 2, 2] for other in others)


def test_send_and_receive_under_tags(crew_of: Crews) -> None:
    def talk(rank: int, group: RunGroup) -> list[float]:
        if rank == 0:
            works = [group.send([torch.full((2,), float(tag))], 1, tag) for tag in (7, 3)]
            works += [group.send([torch.full((2,), 9.0)], 2, 3)]
            return [float(work.wait()) for work in works]
        tags = [3, 7] if rank == 1 else [3]
        got = [torch.zeros(2) for _ in tags]
        for tensor, tag in zip(got, tags, strict=True):
            group.recv([tensor], 0, tag).wait()
        return [float(tensor[0]) for tensor in got]

    assert crew_of(SIZE).each(talk) == [[1, 1, 1], [3, 7], [9]]


def test_groups_of_some_ranks_in_another_order_and_with_other_names(crew_of: Crews) -> None:
    crews = [crew_of(SIZE, [2, 0]), crew_of(SIZE, [2, 0], name="h"), crew_of(SIZE, [1])]

    def gather(rank: int, group: RunGroup) -> list[Tensor]:
        each = [torch.zeros(1) for _ in range(group.size())]
        group.allgather([each], [torch.tensor([float(rank)])], options("AllgatherOptions")).wait()
        return each

    assert [crew.each(gather) for crew in crews] == [
        [[torch.zeros(1), torch.ones(1)]] * 2,
        [[torch.zeros(1), torch.ones(1)]] * 2,
        [[torch.zeros(1)]],
    ]


def test_futures_and_works_of_collectives_in_the_background(crew_of: Crews) -> None:
    def doubled_of(future: Any) -> Any:
        return future.value()[0] * 2

    def chain(rank: int, group: RunGroup) -> tuple[float, list[bool]]:
        works: list[Any] = [group.allreduce([torch.tensor([float(rank)])]) for _ in range(5)]
        doubled = works[4].get_future().then(doubled_of)
        done = [doubled.wait().item()]
        assert [work.wait() for work in works] == [True] * 5
        return done[0], [work.is_completed() and work.is_success() for work in works]

    assert crew_of(SIZE).each(chain) == [(6.0, [True] * 5)] * SIZE


def test_a_callback_may_wait_for_another_collective(crew_of: Crews) -> None:
    def chain(rank: int, group: RunGroup) -> float:
        first: Any = group.allreduce([torch.ones(1)])

        def again(future: Any) -> Tensor:
            second: Any = group.allreduce([future.value()[0]])
            result: Tensor = second.get_future().wait()[0]
            return result

        return float(first.get_future().then(again).wait().item())

    assert crew_of(2).each(chain) == [4.0] * 2


def test_a_future_of_a_collective_that_somebody_waits_for(crew_of: Crews) -> None:
    def both(rank: int, group: RunGroup) -> float:
        tensor = torch.tensor([float(rank)])
        work: Any = group.allreduce([tensor], options("AllreduceOptions"))
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        value = work.get_future().wait()[0].item()
        waiter.join()
        return float(value)

    assert crew_of(SIZE).each(both) == [3.0] * SIZE


def test_more_collectives_at_once_than_tags(
    crew_of: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.bindings.process_group.group.TAGS", 4)

    def many(rank: int, group: RunGroup) -> list[float]:
        tensors = [torch.tensor([float(number)]) for number in range(20)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert crew_of(SIZE).each(many) == [[3.0 * number for number in range(20)]] * SIZE


def test_a_tag_that_a_failed_collective_had(
    crew_of: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is not that of the next one."""
    monkeypatch.setattr("pccl.bindings.process_group.group.TAGS", 2)

    def call(rank: int, group: RunGroup) -> float:
        failed, total = group.allreduce([torch.zeros(2 + rank)]), torch.ones(1)
        with pytest.raises(pccl.errors.DescriptorMismatch):
            failed.wait()
        for _ in range(2):
            group.allreduce([total]).wait()
        return total.item()

    assert crew_of(2).each(call) == [4.0] * 2


def test_an_error_reaches_waits_and_futures(crew_of: Crews) -> None:
    def differ(rank: int, group: RunGroup) -> None:
        work: Any = group.allreduce([torch.zeros(2 + rank)])
        future = work.get_future()
        with pytest.raises(RuntimeError, match="this peer asked for"):
            future.wait()
        with pytest.raises(Exception, match="this peer asked for") as caught:
            work.wait()
        assert type(caught.value).__name__ == "DescriptorMismatch"
        assert work.exception() is caught.value

    crew_of(2).each(differ)
