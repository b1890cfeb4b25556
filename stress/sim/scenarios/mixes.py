"""The mixes of the simulator: what seeds draw, and which faults must strike.

A fault that never strikes proves nothing. So a run of enough seeds fails if an event that its mix
requires never happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pccl.protocol.types import EXCHANGES, REDUCTIONS_OF_PARTS
from pccl.stress.sim.faults.base import LifePhase
from pccl.stress.sim.faults.corrupt import Corrupt, OnWire, flipped_in
from pccl.stress.sim.faults.divide import DIVIDED_IN
from pccl.stress.sim.faults.draws import OF_BITS, OF_MASTERS, OF_NAPS, OF_STATE, PLAIN, kinds
from pccl.stress.sim.faults.kills import Kill
from pccl.stress.sim.faults.processes import Interrupt
from pccl.stress.sim.faults.state import FetchInterrupt, Lies
from pccl.stress.sim.scenarios.naps import draw_with_naps
from pccl.stress.sim.scenarios.scenario import (
    Scenario,
    draw,
    draw_corrupted,
    draw_two_masters,
    draw_with_exchanges,
    draw_with_readers,
    draw_with_store,
)
from pccl.stress.sim.scenarios.to_train import draw_to_train
from pccl.stress.sim.stage import CALLER_LEFT, CALLER_LEFT_DIVIDED, in_phase


@dataclass(frozen=True, slots=True)
class Mix:
    """What the seeds of a run draw, and which faults must strike.

    Attributes:
        draw: draws the scenario of a seed.
        faults: kinds of fault that must strike.
        struck_in: names of events in a phase of life (see ``in_phase``) that must happen.
        done: what calls must come to, by the names of its counts.
        killed_in: phases of life in which processes must be killed.
        seeds_min: minimum number of seeds for which all these events must happen.
    """

    draw: Callable[[int], Scenario]
    faults: tuple[str, ...]
    struck_in: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    killed_in: tuple[LifePhase, ...] = ()
    seeds_min: int = 200

    def missed(self, result: dict[str, Any]) -> list[str]:
        """Return the names with count 0 in a run's summary; empty for too few seeds."""
        if result["seeds"] < self.seeds_min:
            return []
        wanted = {
            "faults": self.faults,
            "struck_in": self.struck_in,
            "done": self.done,
            "kills": tuple(phase.value for phase in self.killed_in),
        }
        return [
            f"killed in {what}" if name == "kills" else what
            for name, all_of_them in wanted.items()
            for what in all_of_them
            if not result[name].get(what, 0)
        ]


_COUNTED_BY_PHASE = (Kill.kind,)
_OF_CALLS = tuple(
    kind for kind in (*kinds(PLAIN), *kinds(OF_STATE)) if kind not in _COUNTED_BY_PHASE
)
_KILLED_IN = tuple(phase for phase in LifePhase if phase is not LifePhase.OTHER)
_OF_QUORUMS = (
    "nap",
    "narrowed",
    "late result",
    "late result is gone",
    "late sync",
    "round without members",
)
_BEFORE_DONE, _DONE = LifePhase.REDUCE_SCATTER, LifePhase.DONE


def _of_calls_without(*faults: str) -> tuple[str, ...]:
    return tuple(kind for kind in _OF_CALLS if kind not in faults)


MIXES: dict[str, Mix] = {
    "default": Mix(draw, _OF_CALLS, done=("in two levels",), killed_in=_KILLED_IN, seeds_min=500),
    "training": Mix(
        draw_to_train,
        _of_calls_without(Interrupt.kind, FetchInterrupt.kind, Lies.kind),
        seeds_min=500,
    ),
    "quorum": Mix(draw_with_naps, (*_OF_CALLS, *kinds(OF_NAPS)), done=_OF_QUORUMS, seeds_min=500),
    "exchange": Mix(
        draw_with_exchanges,
        _OF_CALLS,
        done=(
            *(one.label for one in sorted(EXCHANGES | REDUCTIONS_OF_PARTS)),
            "calls of subsets",
        ),
        seeds_min=500,
    ),
    "store": Mix(
        draw_with_store,
        _OF_CALLS,
        done=tuple(f"store.{call}" for call in ("add", "set", "get", "wait")),
        seeds_min=500,
    ),
    "publishing": Mix(
        draw_with_readers,
        _of_calls_without("behind_nat", "master_death", "takeover"),
        done=(
            *("version published", "version read", "readers have the last version"),
            *("reader killed", "reader frozen", "reader cut off"),
        ),
        seeds_min=500,
    ),
    "corruption": Mix(
        draw_corrupted,
        kinds(OF_BITS),
        struck_in=tuple(flipped_in(Corrupt.kind, where) for where in OnWire),
    ),
    "two-masters": Mix(
        draw_two_masters,
        kinds(OF_MASTERS),
        struck_in=(
            *(in_phase(kind, phase) for kind in kinds(OF_MASTERS) for phase in DIVIDED_IN),
            *(
                in_phase(left, phase)
                for left in (CALLER_LEFT, CALLER_LEFT_DIVIDED)
                for phase in (_BEFORE_DONE, _DONE)
            ),
        ),
    ),
}
