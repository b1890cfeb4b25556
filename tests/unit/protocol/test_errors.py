from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from pccl.protocol import errors
from pccl.protocol.errors import PCCLError, Result

CODES = {
    "SUCCESS": 0,
    "NOT_INITIALIZED": 1,
    "INTERNAL_ERROR": 2,
    "INVALID_ARGUMENT": 3,
    "INVALID_USAGE": 4,
    "TOO_FEW_PEERS": 5,
    "MASTER_CONNECTION_FAILED": 6,
    "RANK_CONNECTION_FAILED": 7,
    "RANK_CONNECTION_LOST": 8,
    "NO_SHARED_STATE_AVAILABLE": 9,
    "PENDING_ASYNC_OPS": 10,
    "UPDATE_TOPOLOGY_FAILED": 11,
    "TOPOLOGY_OPTIMIZATION_FAILED": 12,
}

TYPES = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PCCLError)
]


def test_the_status_codes_are_the_known_ones() -> None:
    assert {result.name: int(result) for result in Result} == CODES


def documented_tree() -> dict[str, str]:
    """Child -> parent, read off the drawing in the module's docstring."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        drawn = line[4:] if line.startswith("    ") else ""
        stripped = drawn.lstrip("│├└─ ")
        if not stripped or not stripped[0].isupper():
            continue
        depth = (len(drawn) - len(stripped)) // 4
        name = stripped.split()[0]
        path = [*path[:depth], name]
        if depth:
            parents[name] = path[depth - 1]
    return parents


def test_the_tree_is_the_one_that_the_docstring_draws() -> None:
    drawn = documented_tree()
    assert len(drawn) == 19
    assert drawn["Evicted"] == "MembershipError"
    assert {kind.__name__ for kind in TYPES} == {*drawn, "PCCLError"}
    for kind in TYPES:
        if kind is not PCCLError:
            assert kind.__bases__[0].__name__ == drawn[kind.__name__]


def test_running_out_of_time_is_a_timeout() -> None:
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert [kind.__name__ for kind in TYPES if issubclass(kind, OSError)] == ["DeadlineExceeded"]


DEFAULTS = {
    "PCCLError": 2,
    "TooFewPeers": 5,
    "CollectiveAborted": 8,
    "DescriptorMismatch": 3,
    "LockstepError": 4,
    "DeadlineExceeded": 8,
    "OutcomeUnknown": 8,
    "ResyncRequired": 4,
    "StateMismatch": 4,
    "StateUnavailable": 4,
    "PendingOperations": 10,
    "NotConnected": 4,
    "PeerSilent": 8,
    "MembershipError": 4,
    "NotAdmitted": 6,
    "Evicted": 8,
    "MasterLost": 8,
    "LinkError": 7,
    "LocalProtocolError": 2,
    "RemoteProtocolError": 8,
}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_each_type(kind: type[PCCLError]) -> None:
    assert kind.__doc__
    plain = kind()
    assert plain.result is Result(DEFAULTS[kind.__name__])
    assert (plain.func, plain.reason) == ("", "")
    error = kind(Result.RANK_CONNECTION_LOST, "all_reduce", "peer 3 is gone")
    assert str(error) == "all_reduce: peer 3 is gone [RANK_CONNECTION_LOST 8]"
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert (again.result, again.func, again.reason) == (
            Result.RANK_CONNECTION_LOST, "all_reduce", "peer 3 is gone",
        )  # fmt: skip
        assert str(again) == str(error)


def test_scripts_construct_it_with_two_positions() -> None:
    error = PCCLError(8, "all_reduce")
    assert error.result is Result.RANK_CONNECTION_LOST
    assert int(error.result) == 8
    assert str(error) == "all_reduce: RANK_CONNECTION_LOST [RANK_CONNECTION_LOST 8]"
    with pytest.raises(ValueError, match="99"):
        PCCLError(99, "all_reduce")


def test_success_is_kept_as_a_result() -> None:
    assert errors.TooFewPeers(Result.SUCCESS).result is Result.SUCCESS


def test_raising_and_chaining() -> None:
    with pytest.raises(errors.MembershipError, match="who knows") as caught:
        raise errors.MasterLost(reason="who knows") from OSError("cause")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.result == 8
