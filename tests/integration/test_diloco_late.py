"""What a peer that joins ``DiLoCo`` late brings on: the inner optimizer's state, and schedulers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, RoundsMissed
from tests.support.diloco_peers import Peers, backward, batch, make_model
from tests.support.patience import LIMIT_S

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"sync_every": 5},
    "delayed": {"sync_every": 6, "delay": 2},
    "streaming": {"sync_every": 6, "delay": 2, "fragments": 3, "compression": "int4"},
}
EARLY = 40
"""Inner steps of the run before the late peer comes."""

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Late:
    """Two members, and a third peer that joins after EARLY steps.

    The members train until the late peer has left. Each may be the last: a member that has begun
    a round when the other leaves finishes it alone.

    Attributes:
        states: the states that the members' inner optimizers have had, the first one empty.
    """

    def __init__(self, peers: Peers, make: Make = adamw, **options: Any) -> None:
        self._peers, self._make = peers, make
        self._options: dict[str, Any] = {"min_peers": 1, **options}
        self.states: list[dict[int, dict[str, Any]]] = [{}]
        self._is_over = threading.Event()
        self._is_begun = threading.Event()
        self._members = [peers.start(self._train, rank) for rank in range(2)]

    def _train(self, rank: int) -> DiLoCo:
        model, number = make_model(), 0
        optimizer = self.wrap(model)
        with optimizer:
            optimizer.join()
            while not self._is_over.is_set():
                optimizer.zero_grad()
                backward(model, batch(rank, number))
                optimizer.step()
                self.states.append(copy.deepcopy(optimizer.inner.state_dict()["state"]))
                number += 1
                if number == EARLY:
                    self._is_begun.set()
            return optimizer

    def wrap(self, model: torch.nn.Module) -> DiLoCo:
        inner = self._make(model.parameters())
        return DiLoCo(model, inner=inner, comm=self._peers.comm(), **self._options)

    def begin(self) -> None:
        assert self._is_begun.wait(LIMIT_S)

    def end(self) -> None:
        self._is_over.set()
        for member in self._members:
            member.result(LIMIT_S)


def same(one: dict[int, dict[str, Any]], two: dict[int, dict[str, Any]]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(two[index][key]))
        for index, state in one.items()
        for key, value in state.items()
    )


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("mode", MODES)
def test_a_late_peer_has_the_state_of_a_member_bit_for_bit(
    peers: Peers, mode: str, make: Make
) -> None:
    """Between two of its inner steps, not in the middle of one."""
    run = Late(peers, make, **MODES[mode])
    run.begin()
    with run.wrap(make_model(seed=2)) as late:
        late.join()
        state = copy.deepcopy(late.inner.state_dict()["state"])
        assert state
        assert late.state is late.inner.state
        assert late.param_groups is late.inner.param_groups
    run.end()
    assert any(same(state, one) for one in run.states)


def test_a_state_that_was_loaded_at_once_is_no_checkpoint(peers: Peers) -> None:
    """Some libraries load the state of an optimizer when they wrap it, to move it to a device."""
    run = Late(peers, sync_every=5)
    run.begin()
    heard: list[Event] = []
    model = make_model(seed=2)
    with DiLoCo(
        model, inner=adamw(model.parameters()), comm=peers.comm(), sync_every=5, min_peers=1,
        on_event=heard.append,
    ) as late:  # fmt: skip
        late.load_state_dict(late.state_dict())
        assert late.param_groups is late.inner.param_groups
        late.join()
        state = copy.deepcopy(late.inner.state_dict()["state"])
    run.end()
    assert any(same(state, one) for one in run.states[1:])
    assert not any(isinstance(event, RoundsMissed) for event in heard)


def test_peers_with_another_inner_optimizer_can_join_if_nothing_is_fetched(peers: Peers) -> None:
    run = Late(peers, momentum, sync_every=5, warm_up=10)
    run.begin()
    model = make_model(seed=2)
    with DiLoCo(
        model, inner=adamw(model.parameters()), comm=peers.comm(), min_peers=1, warm_up=0
    ) as late:
        late.join()
        assert not late.inner.state
        assert late.steps >= EARLY
    run.end()
