"""``ray.util.collective`` with ``backend="pccl"``, beside NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.ray.conftest import RayCluster
from tests.support.patience import LIMIT_S

if find_spec("ray") is None:
    pytest.skip("pip install -e '.[ray]'", allow_module_level=True)

from tests.ray.work import GroupMember

SIZE = 2

ray: Any = import_module("ray")


@pytest.fixture(scope="module")
def members(cluster: RayCluster) -> Iterator[list[Any]]:
    actor = ray.remote(GroupMember).options(num_cpus=0)
    made = [actor.remote() for _ in range(SIZE)]
    # In the opposite order, so that ranks of Ray are not those of the run.
    ray.get([made[rank].join.remote(SIZE, rank) for rank in reversed(range(SIZE))], timeout=LIMIT_S)
    yield made
    for member in made:
        ray.kill(member)


def told(members: list[Any], call: str, *arguments: Any) -> list[Any]:
    """Let all members make a call with the tensors of their ranks."""
    calls = [one.call.remote(call, rank, *arguments) for rank, one in enumerate(members)]
    found: list[Any] = ray.get(calls, timeout=LIMIT_S)
    return found


def sent(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(4, 5)).astype(np.float32)


ALL = np.stack([sent(rank) for rank in range(SIZE)])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_values(members: list[Any], kind: str) -> None:
    reducing: dict[str, Any] = {"SUM": np.sum, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
    for op, reduce in reducing.items():
        wanted = reduce(ALL, axis=0)
        results = told(members, "allreduce", ALL, kind, op)
        np.testing.assert_allclose(results[0], wanted, rtol=1e-5)
        assert len({one.tobytes() for one in results}) == 1
    results = told(members, "reduce", ALL, kind, "SUM", 1)
    np.testing.assert_allclose(results[1], ALL.sum(0), rtol=1e-5)
    assert (results[0] == ALL[0]).all()
    assert all((one == ALL[1]).all() for one in told(members, "broadcast", ALL, kind, "SUM", 1))
    assert all((one == ALL).all() for one in told(members, "allgather", ALL, kind))
    for rank, part in enumerate(told(members, "reducescatter", ALL, kind)):
        np.testing.assert_allclose(part, (ALL[rank] * (1 + np.arange(SIZE)).sum()), rtol=1e-5)
    passed = told(members, "pass_on", ALL, kind)
    assert all((passed[rank] == ALL[rank - 1]).all() for rank in range(SIZE))
    told(members, "barrier", ALL, kind)


def test_what_there_is_not(members: list[Any]) -> None:
    with pytest.raises(NotImplementedError, match="start a process for each GPU"):
        ray.get(members[0].refused.remote(), timeout=LIMIT_S)


def test_a_lost_member_ends_calls_and_the_group_is_made_anew(members: list[Any]) -> None:
    """By members that destroy it at different times, with a new actor for the lost one."""
    ray.get([one.barrier.remote() for one in members], timeout=LIMIT_S)
    call = members[0].call.remote("allreduce", 0, ALL)
    ray.kill(members.pop())
    with pytest.raises(import_module("pccl.errors").CollectiveAborted):
        ray.get(call, timeout=LIMIT_S)
    members.append(ray.remote(GroupMember).options(num_cpus=0).remote())
    anew = [one.join.remote(SIZE, rank) for rank, one in enumerate(members)]
    ray.get(anew, timeout=LIMIT_S)
    for one in told(members, "allreduce", ALL):
        np.testing.assert_allclose(one, ALL.sum(0), rtol=1e-5)


def test_a_group_of_one(members: list[Any]) -> None:
    alone = members[0]
    ray.get(alone.join.remote(1, 0, "alone"), timeout=LIMIT_S)
    for call in ("allreduce", "reduce", "broadcast", "reducescatter", "allgather"):
        result = ray.get(alone.call.remote(call, 0, ALL[:1], "numpy", "SUM", 0, "alone"))
        assert (result == ALL[0]).all()
