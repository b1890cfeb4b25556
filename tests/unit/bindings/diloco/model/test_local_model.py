"""The local model: what a pseudo-gradient is, and what of the model outlives a merge."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco.model.local_model import LocalFragment, LocalModel, named_parameters  # noqa: E402
from pccl.bindings.diloco.model.outer import OuterFragment  # noqa: E402
from pccl.bindings.diloco.model.outer_optimizers import nesterov  # noqa: E402


def listed(tensor: Any) -> list[Any]:
    """Its values."""
    values: list[Any] = tensor.tolist()
    return values


def part_of(
    *values: list[float], dtype: Any = None
) -> tuple[LocalFragment, list[Any], OuterFragment]:
    """Parameters, and the part and the outer parameters made of them."""
    tensors = [torch.nn.Parameter(torch.tensor(one, dtype=dtype)) for one in values]
    part = LocalFragment([(str(index), tensor) for index, tensor in enumerate(tensors)], nesterov)
    return part, tensors, part.outer


def moved(tensors: list[Any], *by: float) -> None:
    """Inner steps: each parameter becomes smaller by so much."""
    with torch.no_grad():
        for tensor, one in zip(tensors, by, strict=True):
            tensor -= one


def taken(part: LocalFragment) -> Any:
    """A pseudo-gradient, after which the training goes on."""
    work = part.take()
    part.hold()
    return work


def flat(tensors: list[Any]) -> list[float]:
    return [value for tensor in tensors for value in listed(tensor.detach().float().flatten())]


def test_a_pseudo_gradient_is_what_was_there_minus_what_is_there() -> None:
    part, tensors, _ = part_of([8.0, 9.0], [10.0])
    moved(tensors, 1, 3)
    assert listed(taken(part)) == [1, 1, 3]
    assert flat(tensors) == [7, 8, 7]
    assert listed(part.base) == [7, 8, 7]
    assert listed(taken(part)) == [0, 0, 0]
    moved(tensors, 2, 0)
    assert listed(taken(part)) == [2, 2, 0]


def test_a_merge_takes_over_the_outer_parameters() -> None:
    part, tensors, _ = part_of([8.0], [10.0])
    moved(tensors, 1, 1)
    taken(part)
    part.merge(torch.tensor([5.0, 6.0]), 0.0)
    assert flat(tensors) == [5, 6]
    assert listed(taken(part)) == [0, 0]
    moved(tensors, 1, 2)
    assert listed(taken(part)) == [1, 2]


def test_mixing_keeps_so_much_of_the_local_parameters() -> None:
    """Streaming DiLoCo, arXiv:2501.18512: the next pseudo-gradient is from the outer parameters."""
    part, tensors, _ = part_of([8.0], [16.0])
    taken(part)
    moved(tensors, 0, 4)
    part.merge(torch.tensor([4.0, 4.0]), 0.25)
    assert flat(tensors) == [5, 6]  # 8 / 4 + 4 * 3 / 4, 12 / 4 + 4 * 3 / 4
    assert listed(part.base) == [4, 4]
    assert listed(taken(part)) == [-1, -2]


def test_an_anchor_keeps_the_work_since_the_base() -> None:
    part, tensors, _ = part_of([8.0], [16.0])
    moved(tensors, 1, 2)
    assert part.anchor(torch.tensor([100.0, 200.0]), [])
    assert flat(tensors) == [99, 198]
    assert listed(part.base) == [100, 200]
    assert listed(taken(part)) == [1, 2]


def test_an_anchor_counts_again_what_was_not_applied() -> None:
    part, tensors, _ = part_of([8.0], [16.0])
    moved(tensors, 1, 2)
    first = taken(part)
    moved(tensors, 4, 0)
    second = taken(part)
    moved(tensors, 0, 32)
    assert part.anchor(torch.tensor([100.0, 200.0]), [first, second])
    assert flat(tensors) == [95, 166]
    assert listed(taken(part)) == [5, 34]
    assert listed(first) == [1, 2]


def test_an_anchor_where_the_model_is_changes_nothing() -> None:
    part, tensors, fragment = part_of([8.0], [16.0])
    assert not part.anchor(fragment.flat.clone(), [])
    assert flat(tensors) == [8, 16]
    assert part.anchor(torch.tensor([8.0, 15.0]), [])


def test_what_was_taken_needs_no_copy_before_a_merge() -> None:
    part, tensors, _ = part_of([8.0], [16.0])
    base = part.base
    moved(tensors, 1, 2)
    work = part.take()
    assert work.data_ptr() == base.data_ptr(), "the base is not needed any more"
    common = torch.tensor([5.0, 6.0])
    part.merge(common, 0.0)
    assert part.base is common
    part.take()
    assert part.anchor(torch.tensor([100.0, 200.0]), [work])
    assert flat(tensors) == [99, 198]


def test_lost_work_is_kept_without_a_base() -> None:
    part, tensors, _ = part_of([8.0], [16.0])
    moved(tensors, 1, 2)
    part.put_back(part.take())
    assert listed(part.base) == [8, 16]
    assert listed(taken(part)) == [1, 2]


# -- dtypes --------------------------------------------------------------------------------------

FINE = 1.0 + 2.0**-12
"""No bfloat16 and no float16: the next below is 1."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_rounding_is_no_work_after_a_merge(dtype: Any, mixing: float) -> None:
    part, tensors, _ = part_of([1.0, 1.0], [2.0], dtype=dtype)
    taken(part)
    part.merge(torch.tensor([FINE, FINE, 2 * FINE]), mixing)
    assert [tensor.dtype for tensor in tensors] == [dtype, dtype]
    assert flat(tensors) == [1, 1, 2]
    # With mixing, half of what lies between the two is left to do, but not the rounding.
    left = mixing * 2.0**-12
    assert listed(taken(part)) == [left, left, 2 * left]
    moved(tensors, 0.25, 0.5)
    assert listed(taken(part)) == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_work_after_an_anchor(dtype: Any) -> None:
    part, tensors, _ = part_of([1.0], dtype=dtype)
    moved(tensors, 0.25)
    part.anchor(torch.tensor([FINE]), [])
    assert flat(tensors) == [0.75]
    assert listed(taken(part)) == [0.25]


def test_small_work_of_a_coarse_model_adds_up_in_the_outer_parameters() -> None:
    """Rounds that move the outer parameters by less than bfloat16 tells apart are not undone."""
    part, tensors, fragment = part_of([1.0], dtype=torch.bfloat16)
    for _ in range(8):
        work = taken(part)
        assert listed(work) == [0.0]
        fragment.flat -= 2.0**-10  # what the others have done
        part.merge(fragment.flat.clone(), 0.0)
    assert listed(fragment.flat) == [1 - 2.0**-7]
    assert flat(tensors) == [1 - 2.0**-7]


def test_parameters_of_several_dtypes_are_one_part() -> None:
    tensors = [
        torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.tensor([[4.0]], dtype=torch.float64)),
    ]
    part = LocalFragment([("a", tensors[0]), ("b", tensors[1])], nesterov)
    moved(tensors, 0.5, 2.0**-40)
    work = taken(part)
    assert work.dtype == torch.float64
    assert listed(work) == [0.5, 0.5, 2.0**-40]


def test_tensors_that_are_not_contiguous_are_read_and_written_in_order() -> None:
    tensor = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t())
    part = LocalFragment([("t", tensor)], nesterov)
    assert listed(part.base) == [1, 3, 2, 4]
    part.merge(torch.tensor([5.0, 6.0, 7.0, 8.0]), 0.0)
    assert listed(tensor) == [[5, 6], [7, 8]]


def test_a_replica_that_takes_over_leaves_its_work_out() -> None:
    tensors = [torch.nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0)]
    replica = LocalModel([[("a", tensors[0])], [("b", tensors[1])]], nesterov)
    moved(tensors, 0.5, 0.5)
    replica.take_over()
    assert flat(tensors) == [1, 2]
    assert [listed(taken(part)) for part in replica.parts] == [[0], [0]]
    moved(tensors, 0.5, 0.5)  # the outer parameters are not the model's memory
    assert [listed(part.outer.flat) for part in replica.parts] == [[1], [2]]


# -- which parameters ----------------------------------------------------------------------------


def parameters(count: int) -> list[Any]:
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]


def names(params: Any, inner: Any) -> list[str]:
    return [name for name, _ in named_parameters(params, inner)]


def test_parameters_may_be_tensors_pairs_or_groups() -> None:
    first, second, third = parameters(3)
    inner = torch.optim.SGD([first, second, third], lr=1.0)
    assert names([first, second, third], inner) == ["0", "1", "2"]
    assert names(iter([("a", first), ("b", second), ("c", third)]), inner) == ["a", "b", "c"]
    groups = [{"params": [first]}, {"params": [("b", second), ("c", third)], "lr": 2.0}]
    assert names(groups, inner) == ["0", "b", "c"]


def test_names_come_from_a_module_or_from_the_inner_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False))
    own = ["0.weight", "0.bias", "1.weight"]
    assert names(model, torch.optim.SGD(model.parameters(), lr=1.0)) == own
    compiled = torch.nn.Module()  # as torch.compile makes it
    compiled.add_module("_orig_mod", model)
    assert names(compiled, torch.optim.SGD(model.parameters(), lr=1.0)) == own
    inner: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    (group,) = inner.param_groups
    group["param_names"] = own  # as torch 2.6 does for named_parameters()
    assert names(model.parameters(), inner) == own
    assert names([("a", model[0].weight), *model.parameters()], inner) == ["a", *own[1:]]


def test_tied_parameters_count_once_and_frozen_ones_not() -> None:
    first, second, frozen = parameters(3)
    frozen.requires_grad_(False)
    inner = torch.optim.SGD([first, second, frozen], lr=1.0)
    assert names([("a", first), ("f", frozen), ("b", second), ("tied", first)], inner) == ["a", "b"]


def test_what_cannot_be_averaged_is_refused_in_words() -> None:
    first, second = parameters(2)
    inner = torch.optim.SGD([first, second], lr=1.0)
    with pytest.raises(ValueError, match="inner trains 1 tensors that are not in params"):
        named_parameters([first], inner)
    with pytest.raises(ValueError, match="two parameters have the same name"):
        named_parameters([("a", first), ("a", second)], inner)
    with pytest.raises(TypeError, match=r"params must be a module.*not str"):
        named_parameters(["weight"], inner)
    with pytest.raises(ValueError, match="inner trains 2 tensors that are not in params"):
        named_parameters(torch.nn.Linear(1, 1), inner)
    frozen = torch.zeros(1)
    with pytest.raises(ValueError, match="no tensor that requires a gradient"):
        named_parameters([frozen], torch.optim.SGD([frozen], lr=1.0))
    turning = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"parameter 0 is of torch\.complex64; only floats"):
        named_parameters([turning], torch.optim.SGD([turning], lr=1.0))


def test_a_preview_takes_a_share_of_own_work_and_needs_the_optimizers_state() -> None:
    part, tensors, outer = part_of([8.0], [10.0])
    moved(tensors, 1, 2)
    work, state = taken(part), outer.copy_state()
    assert listed(part.preview(torch.tensor([5.0, 6.0]), None, work, 0.5)) == [5, 6]
    ahead = part.preview(torch.tensor([5.0, 6.0]), state, work, 0.5)
    assert listed(ahead) == pytest.approx([5 - 0.7 * 1.9 * 0.5, 6 - 0.7 * 1.9])  # momentum was 0
    part.merge(ahead, 0.0)
    moved(tensors, 1, 2)
    assert listed(taken(part)) == pytest.approx([1, 2]), "the preview is no work"
