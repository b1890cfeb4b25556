"""What the logs of a run under churn say: whose steps are in it, and after how many tokens.

A log is what ``JsonlWriter`` has written for one peer of ``examples/train_gpt.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Log = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Survivor:
    """One peer that was there at the end.

    Attributes:
        name: of the process.
        inner_steps: that it has made.
        lost_steps: that should be in an average, and are in none; of all fragments together.
        entries: how often it has joined: more than once if it was cut off.
        loss: of its model on the held-out text, in nats per byte.
    """

    name: str
    inner_steps: int
    lost_steps: float
    entries: int
    loss: float


def survivor(name: str, log: Log, *, fragments: int, tokens: int) -> Survivor:
    """What became of the steps of one peer that has trained to the end.

    Args:
        name: of the process.
        log: its own.
        fragments: how many there are.
        tokens: in a step.
    """
    made, entries, loss, peers = 0, 0, float("nan"), set[int]()
    counted = dict.fromkeys(range(fragments), 0.0)
    for event in log:
        match event["event"]:
            case "InnerStep":
                made = event["step"]
            case "OuterStep":
                counted[event["fragment"]] += event["own_weight"] / tokens
            case "MembersChanged":
                peers.add(event["peer_id"])
            case "Evaluated":
                loss = event["loss"]
            case _:
                pass
    entries = len(peers)
    missing = fragments * made - sum(counted.values())
    return Survivor(name, made, missing, entries, loss)


def tokens_of(logs: Iterable[Log], fragments: int) -> float:
    """How many tokens are in the outer parameters at the end, by what all logs together say."""
    by_number: dict[int, float] = {}
    for log in logs:
        for event in log:
            if event["event"] == "OuterStep":
                by_number[event["number"]] = event["total_weight"]
    last = max(by_number, default=0)
    if missing := set(range(1, last + 1)) - set(by_number):
        raise ValueError(f"no log has the outer steps {sorted(missing)}")
    return sum(by_number.values()) / fragments
