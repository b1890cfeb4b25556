"""The codes of errors per call: the code's table, the documented one, and PCCL's."""

from __future__ import annotations

import pickle

import pytest

from pccl import errors, inquiry
from pccl.errors import RESULT_OF_CALL, TOLD_PER_CALL, PCCLError, Result, named
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "errors.md"

KINDS: dict[str, type[PCCLError]] = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, PCCLError)
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_error_is_documented_with_its_code() -> None:
    documented = {row[0]: row[-1] for row in rows("Each error")}
    told = {kind.__name__ for kind in TOLD_PER_CALL}
    assert documented.keys() == KINDS.keys() - {"PCCLError"}
    assert {name for name, code in documented.items() if code == "per call"} == told
    assert {name: int(code) for name, code in documented.items() if name not in told} == {
        name: int(kind.default_result)
        for name, kind in KINDS.items()
        if name != "PCCLError" and name not in told
    }
    assert all(all(row) for row in rows("Each error"))


def test_the_causes_of_evicted_are_there_too() -> None:
    assert errors.RemovalCause is inquiry.RemovalCause
    cause = pickle.loads(pickle.dumps(errors.RemovalCause.STATE_CONFLICT))
    assert cause is errors.RemovalCause["STATE_CONFLICT"]


def test_the_codes_per_call_are_the_documented_ones() -> None:
    documented = {
        call.strip("`"): (int(code), name)
        for calls, code, name in rows("The codes that depend on the call")
        for call in calls.split(", ")
    }
    assert documented == {
        call: (int(result), result.name) for call, result in RESULT_OF_CALL.items()
    }


def test_the_codes_are_those_of_pccl() -> None:
    assert {call: int(result) for call, result in RESULT_OF_CALL.items()} == {
        "connect": 6, "update_topology": 11, "are_peers_pending": 4, "optimize_topology": 12,
        "all_reduce": 8, "all_reduce_multiple_with_retry": 8, "all_reduce_many": 8,
        "broadcast": 8, "barrier": 8, "all_gather": 8, "gather": 8, "scatter": 8,
        "all_to_all": 8, "reduce": 8, "reduce_scatter": 8,
        "send": 8, "recv": 8, "sync_shared_state": 4, "verify": 4,
    }  # fmt: skip


@pytest.mark.parametrize("call", ["all_reduce_async", "all_gather_object"])
def test_a_variant_of_a_call_has_its_code(call: str) -> None:
    assert named(errors.DeadlineExceeded(), call).result is Result.RANK_CONNECTION_LOST


@pytest.mark.parametrize("call", [*RESULT_OF_CALL, "get_attribute"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_named(kind: type[PCCLError], call: str) -> None:
    error = kind(None, "", "peer 3 is gone")
    error.completed_tags = (4, 5)
    error.__cause__ = cause = OSError("reset")
    copy = named(error, call)
    assert type(copy) is kind
    assert copy is not error
    assert (copy.func, copy.reason, copy.completed_tags) == (call, "peer 3 is gone", (4, 5))
    assert copy.__cause__ is cause
    told = kind in TOLD_PER_CALL and call in RESULT_OF_CALL
    assert copy.result is (RESULT_OF_CALL[call] if told else kind.default_result)
    chosen = named(kind(Result.NOT_INITIALIZED), call)
    assert chosen.result is (RESULT_OF_CALL[call] if told else Result.NOT_INITIALIZED)
