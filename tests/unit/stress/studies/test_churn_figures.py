"""What logs of a churned run say, told by logs written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.stress.studies.churn_figures import survivor, tokens_of

TOKENS = 8


def inner(step: int) -> dict[str, Any]:
    return {"event": "InnerStep", "step": step}


def outer(number: int, fragment: int, own: float, total: float) -> dict[str, Any]:
    return {
        "event": "OuterStep",
        "number": number,
        "fragment": fragment,
        "own_weight": own,
        "total_weight": total,
    }


def met(peer: int) -> dict[str, Any]:
    return {"event": "MembersChanged", "peer_id": peer}


def test_all_steps_are_in_the_averages() -> None:
    log = [
        met(3),
        inner(10),
        outer(1, 0, 80.0, 240.0),
        inner(20),
        outer(2, 0, 80.0, 160.0),
        {"event": "Evaluated", "loss": 1.5},
    ]
    found = survivor("a", log, fragments=1, tokens=TOKENS)
    assert (found.inner_steps, found.lost_steps, found.entries, found.loss) == (20, 0, 1, 1.5)
    assert tokens_of([log], 1) == 400.0


def test_a_lost_round_shows() -> None:
    log = [met(3), inner(10), outer(1, 0, 80.0, 240.0), met(4), inner(20), outer(2, 0, 0.0, 160.0)]
    found = survivor("a", log, fragments=1, tokens=TOKENS)
    assert (found.lost_steps, found.entries) == (10, 2)


def test_with_fragments_each_counts_the_steps_since_its_own_round() -> None:
    # Of 40 steps: fragment 0 after 10, 30 steps, and in a last round; 1 after 20, 40.
    log = [
        inner(40),
        outer(1, 0, 80.0, 80.0),
        outer(2, 1, 160.0, 160.0),
        outer(3, 0, 160.0, 160.0),
        outer(4, 1, 160.0, 160.0),
        outer(5, 0, 80.0, 80.0),
    ]
    assert survivor("a", log, fragments=2, tokens=TOKENS).lost_steps == 0
    assert survivor("a", log[:-1], fragments=2, tokens=TOKENS).lost_steps == 10
    assert tokens_of([log[:3], log[2:]], 2) == 320.0


def test_outer_steps_that_nobody_has_seen_are_told() -> None:
    with pytest.raises(ValueError, match=r"no log has the outer steps \[2\]"):
        tokens_of([[outer(1, 0, 1.0, 1.0)], [outer(3, 0, 1.0, 1.0)]], 1)
