"""The wrapper and the schedulers are found in what a trainer gives to its callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import pccl  # noqa: E402
from pccl.bindings.diloco import DiLoCo  # noqa: E402
from pccl.bindings.events import InnerStep, TrainsAlone  # noqa: E402
from pccl.bindings.trainers.following import follow, points, wrapper_of  # noqa: E402

schedulers: Any = torch.optim.lr_scheduler


@pytest.fixture
def opt() -> DiLoCo:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return DiLoCo(inner=inner, comm=pccl.Communicator("127.0.0.1:9"))


def test_a_wrapper_of_the_wrapper_is_opened(opt: DiLoCo) -> None:
    assert wrapper_of(opt) is opt
    assert wrapper_of(SimpleNamespace(optimizer=opt)) is opt
    with pytest.raises(TypeError, match="optimizer of the trainer must be a DiLoCo, not SGD"):
        wrapper_of(SimpleNamespace(optimizer=opt.inner))


@pytest.mark.parametrize("make", ["StepLR", "ReduceLROnPlateau"])
def test_schedulers_that_count_steps_follow(opt: DiLoCo, make: str) -> None:
    counts = make == "StepLR"
    scheduler = getattr(schedulers, make)(opt, *([10] if counts else []))
    follow(opt, SimpleNamespace(scheduler=scheduler))
    assert len(opt._followed) == counts  # pyright: ignore[reportPrivateUsage]


def test_inner_steps_are_not_drawn() -> None:
    assert points(InnerStep(step=1, seconds=0.1)) == {}
    assert points(TrainsAlone(step=1)) == {"group/members": 1.0}
