"""What error feedback keeps, when it changes, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pccl
from pccl import DataType, ErrorFeedback


def committed(feedback: ErrorFeedback, name: str, values: list[float]) -> None:
    use = feedback.begin(name, len(values), DataType.FLOAT)
    use.staged[:] = values
    use.commit()


def test_the_first_use_has_nothing_to_add() -> None:
    use = ErrorFeedback().begin("x", 3, DataType.FLOAT)
    assert use.current is None
    assert use.staged.dtype == np.float32
    assert use.staged.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (DataType.FLOAT16, np.float32),
        (DataType.BFLOAT16, np.float32),
        (DataType.DOUBLE, np.float64),
    ],
)
def test_the_residual_is_as_precise_as_the_arithmetic(kind: DataType, dtype: type[Any]) -> None:
    assert ErrorFeedback().begin("x", 1, kind).staged.dtype == dtype


def test_a_commit_swaps_and_a_drop_forgets() -> None:
    feedback = ErrorFeedback()
    committed(feedback, "x", [1, 2])
    lost = feedback.begin("x", 2, DataType.FLOAT)
    assert lost.current is not None
    assert lost.current.tolist() == [1, 2]
    lost.staged[:] = 9
    lost.drop()
    again = feedback.begin("x", 2, DataType.FLOAT)
    assert again.current is not None
    assert again.current.tolist() == [1, 2]
    assert again.staged.tolist() == [0, 0]
    again.staged[:] = [3, 4]
    again.commit()
    assert feedback.state_dict()["x"].tolist() == [3, 4]


def test_errors_decay() -> None:
    feedback = ErrorFeedback(decay=0.5)
    committed(feedback, "x", [1, -4])
    assert feedback.state_dict()["x"].tolist() == [0.5, -2]
    residual = feedback.begin("x", 2, DataType.FLOAT)
    assert residual.current is not None
    assert residual.current.tolist() == [0.5, -2]
    residual.drop()
    assert feedback.state_dict()["x"].tolist() == [0.5, -2]


def test_what_was_not_sent_does_not_decay() -> None:
    feedback = ErrorFeedback(decay=0.5)
    feedback.load_state_dict({"x": np.array([4, 8], np.float32)})
    residual = feedback.begin("x", 2, DataType.FLOAT)
    residual.keep(slice(1, 2))
    residual.keep(slice(1, 2))
    residual.staged[:] += [2, 1]
    residual.commit()
    assert feedback.state_dict()["x"].tolist() == [1, 8.5]
    residual = feedback.begin("x", 2, DataType.FLOAT)
    residual.keep(slice(0, 2))
    residual.forget()
    assert feedback.state_dict()["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("decay", "kind"), [(-0.1, ValueError), (1.1, ValueError), ("1", TypeError)]
)
def test_a_decay_is_a_share(decay: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="decay must be"):
        ErrorFeedback(decay=decay)


def test_what_was_not_finite_leaves_nothing_behind() -> None:
    feedback = ErrorFeedback()
    committed(feedback, "x", [np.nan, np.inf, -np.inf, 5])
    assert feedback.state_dict()["x"].tolist() == [0, 0, 0, 5]


def test_a_use_ends_once() -> None:
    feedback = ErrorFeedback()
    use = feedback.begin("x", 2, DataType.FLOAT)
    use.drop()
    with pytest.raises(AssertionError, match="has ended"):
        use.commit()
    assert feedback.state_dict() == {}


def test_two_uses_of_one_name_are_refused() -> None:
    feedback = ErrorFeedback()
    use = feedback.begin("x", 2, DataType.FLOAT)
    feedback.begin("y", 2, DataType.FLOAT).drop()
    with pytest.raises(ValueError, match=r"a reduce in flight uses the residual of 'x'; wait"):
        feedback.begin("x", 2, DataType.FLOAT)
    use.drop()
    feedback.begin("x", 2, DataType.FLOAT).drop()


@pytest.mark.parametrize(("count", "kind"), [(3, DataType.FLOAT), (2, DataType.DOUBLE)])
def test_another_tensor_under_the_name_is_refused(count: int, kind: DataType) -> None:
    feedback = ErrorFeedback()
    committed(feedback, "x", [1, 2])
    with pytest.raises(ValueError, match=r"is 2 x float32, .* call forget\('x'\)"):
        feedback.begin("x", count, kind)
    feedback.forget("x")
    assert feedback.begin("x", count, kind).current is None


def test_checkpoints() -> None:
    feedback = ErrorFeedback()
    committed(feedback, "x", [1, 2])
    state = feedback.state_dict()
    committed(feedback, "x", [3, 4])
    committed(feedback, "y", [5])
    assert state["x"].tolist() == [1, 2]
    feedback.load_state_dict(state)
    assert list(feedback.state_dict()) == ["x"]
    state["x"][:] = 7
    use = feedback.begin("x", 2, DataType.FLOAT)
    assert use.current is not None
    assert use.current.tolist() == [1, 2]
    use.staged[:] = 8
    assert feedback.state_dict()["x"].tolist() == [1, 2]
    assert repr(feedback) == "ErrorFeedback(1 residuals)"


def test_nothing_is_taken_away_while_it_is_used() -> None:
    feedback = ErrorFeedback()
    use = feedback.begin("x", 1, DataType.FLOAT)
    words = "in flight uses the residual of 'x'; wait for it"
    with pytest.raises(ValueError, match=words):
        feedback.load_state_dict({})
    with pytest.raises(ValueError, match=words):
        feedback.forget("x")
    use.drop()
    feedback.forget("x")
    feedback.load_state_dict({})


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ({1: np.zeros(2)}, TypeError, "a name must be a string"),
        ({"x": np.zeros(2, np.int64)}, ValueError, r"'x' must be float32 or float64 .* not int64"),
        ({"x": np.zeros((2, 2))}, ValueError, r"of shape \(2, 2\)"),
        ({"x": np.array([1, np.nan])}, ValueError, "holds NaN or infinity"),
    ],
)
def test_what_is_no_checkpoint(state: Any, kind: type[Exception], words: str) -> None:
    feedback = ErrorFeedback()
    committed(feedback, "kept", [1])
    with pytest.raises(kind, match=words):
        feedback.load_state_dict(state)
    assert list(feedback.state_dict()) == ["kept"]


def test_it_is_public() -> None:
    assert pccl.ErrorFeedback is ErrorFeedback


def test_who_does_not_know_whether_it_counts_owes_nothing() -> None:
    feedback = ErrorFeedback()
    committed(feedback, "x", [1, 2])
    use = feedback.begin("x", 2, DataType.FLOAT)
    use.staged[:] = [3, 4]
    use.forget()
    assert feedback.state_dict()["x"].tolist() == [0, 0]
    use.drop()
    assert feedback.begin("x", 2, DataType.FLOAT).staged.tolist() == [0, 0]


def test_a_failure_to_find_memory_leaves_the_name_free() -> None:
    feedback = ErrorFeedback()
    with pytest.raises((MemoryError, ValueError)):
        feedback.begin("x", 1 << 62, DataType.FLOAT)
    feedback.begin("x", 2, DataType.FLOAT).drop()


@pytest.mark.parametrize("array", [np.zeros(2, ">f4"), np.zeros(2, np.longdouble)])
def test_foreign_floats_are_no_residuals(array: Any) -> None:
    with pytest.raises(ValueError, match="must be float32 or float64"):
        ErrorFeedback().load_state_dict({"x": array})


@pytest.mark.parametrize("state", [None, list(range(10_000))])
def test_a_state_is_a_mapping(state: Any) -> None:
    with pytest.raises(TypeError, match="state_dict") as caught:
        ErrorFeedback().load_state_dict(state)
    assert len(str(caught.value)) < 300  # it does not show all of a large argument


def test_what_begin_would_refuse_is_told_before() -> None:
    feedback = ErrorFeedback()
    committed(feedback, "x", [1, 2])
    feedback.check("x", 2, DataType.FLOAT)
    with pytest.raises(ValueError, match="forget"):
        feedback.check("x", 3, DataType.FLOAT)
    feedback.begin("x", 2, DataType.FLOAT)
    with pytest.raises(ValueError, match="in flight"):
        feedback.check("x", 2, DataType.FLOAT)
