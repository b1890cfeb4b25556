"""torch's ``Store`` over a run: from Python, and from torch's C++ code below a ``PrefixStore``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.integration.conftest import Run
from tests.support.patience import LIMIT_S

dist = pytest.importorskip("torch.distributed")

from pccl.bindings.process_group.store import RunStore  # noqa: E402

RunOf = Callable[..., Run]
SHORT = timedelta(milliseconds=50)


def stores(run: Run, kind: str) -> list[Any]:
    """A store of each member; kept by nobody but its communicator, as torch does it."""
    plain = [RunStore(member) for member in run.members]
    if kind == "plain":
        return plain
    prefixed = [dist.PrefixStore("prefix", store) for store in plain]
    del plain
    gc.collect()
    return prefixed


@pytest.fixture(params=["plain", "prefixed"])
def pair(request: pytest.FixtureRequest, run_of: RunOf) -> list[Any]:
    run = run_of(2)
    store = run.members[0].store
    found = stores(run, request.param)
    assert store.count() == 0
    return found


@pytest.fixture(autouse=True)
def _empty(run_of: RunOf) -> Any:  # pyright: ignore[reportUnusedFunction]
    yield
    store = run_of(2).members[0].store
    for prefix in ("", "prefix/"):
        for key in ("k", "n", "c", "a", "l", "one", "two", "last", "x" * 300):
            if len(prefix + key) < 256:
                store.delete(prefix + key)


def test_it_does_what_torchs_own_stores_do(pair: list[Any]) -> None:
    """The same calls on both: the same results."""
    for one, two in (pair, [dist.HashStore()] * 2):
        one.set("k", "value")
        assert two.get("k") == b"value"
        assert (two.add("n", 2), one.add("n", 3), one.get("n")) == (2, 5, b"5")
        assert one.compare_set("c", "expected", "desired") == b"expected"
        assert not two.check(["c"])
        assert one.compare_set("c", "", "first") == b"first"
        assert two.compare_set("c", "no", "second") == b"first"
        assert two.compare_set("c", "first", "second") == b"second"
        assert one.num_keys() == 3
        assert one.check(["k", "n", "c"])
        one.append("a", "x")
        two.append("a", "y")
        assert one.get("a") == b"xy"
        assert one.has_extended_api()
        one.multi_set(["one", "two"], ["1", "2"])
        assert two.multi_get(["one", "two"]) == [b"1", b"2"]
        two.wait(["one", "two"])
        two.wait(["one", "two"], SHORT)
        assert one.delete_key("k")
        assert not two.delete_key("k")
        assert two.clone().get("n") == b"5"


def test_a_wait_that_takes_too_long(pair: list[Any]) -> None:
    one, _ = pair
    with pytest.raises(dist.DistStoreError, match="wait timeout, keys: "):
        one.wait(["k", "n"], SHORT)
    one.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout, keys: "):
        one.get("k")
    with pytest.raises(dist.DistStoreError, match="wait timeout, keys: "):
        one.multi_get(["k"])
    one.set_timeout(timedelta(seconds=300))
    assert one.timeout == timedelta(seconds=300)


def test_a_wait_for_another_member(pair: list[Any], run_of: RunOf) -> None:
    one, two = pair
    waiting = run_of(2).start(one.get, "l")
    two.set("l", "late")
    assert waiting.result(LIMIT_S) == b"late"


def test_a_barrier_of_torch(pair: list[Any], run_of: RunOf) -> None:
    run = run_of(2)
    limit = timedelta(seconds=LIMIT_S)
    waiting = run.start(pair[0].barrier, "b", 2, limit)
    pair[1].barrier("b", 2, limit)
    waiting.result(LIMIT_S)
    for store in pair[:1]:
        for key in ("num_members", "last_member"):
            store.delete_key(f"b/{key}")


def test_long_keys_are_shortened_and_stay_apart(run_of: RunOf) -> None:
    store = RunStore(run_of(2).members[0])
    keys = ["x" * 300 + "a", "x" * 300 + "b", "é" * 200]
    store.multi_set(keys, ["1", "2", "3"])
    assert store.multi_get(keys) == [b"1", b"2", b"3"]
    assert [store.delete_key(key) for key in keys] == [True] * 3


def test_mistakes_and_a_full_store(pair: list[Any]) -> None:
    one, _ = pair
    one.set("k", "text")
    with pytest.raises(ValueError, match="64-bit number"):
        one.add("k", 1)
    with pytest.raises(ValueError, match="65536 bytes"):
        one.set("k", "x" * 70000)


def test_the_end_of_the_membership(new_run: RunOf) -> None:
    run = new_run(1)
    (member,) = run.members
    store = RunStore(member)
    member.close()
    with pytest.raises(dist.DistNetworkError, match="closed"):
        store.num_keys()


def test_the_store_does_not_keep_the_communicator(new_run: RunOf) -> None:
    run = new_run()
    comm = run.newcomer()
    store = RunStore(comm)
    run._made.clear()  # pyright: ignore[reportPrivateUsage]
    del comm
    gc.collect()
    with pytest.raises(dist.DistNetworkError, match="gone"):
        store.num_keys()
