"""Decides what follows the end of a peer. It neither knows Ray nor reads a clock.

| the peer | what follows |
| --- | --- |
| returned | its result is kept, and the run ends: no later end of a peer is followed by a new one |
| left, because its node will be removed | a new peer starts at once |
| was lost with its node | a new peer starts at once |
| raised or died | a new peer starts after a pause; or the run fails |

A slot whose peers fail more than ``failures_max`` times in a row fails the run. Failures are in a
row if the peers lived for less than ``SETTLED_S``. When the run ends, an error fails it, unless the
peer came late, and has perhaps met no other one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pccl import config

SETTLED_S = 60.0
"""A peer that lived so long has not failed because of how it starts."""

PAUSE_S, PAUSE_S_MAX = 1.0, 30.0
"""Pause before a failed peer is replaced: the first one, and the longest."""

PEER_INDEX = "PCCL_PEER_INDEX"

OURS = {
    *("concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_restarts"),
    *("max_task_retries", "name", "namespace"),
}
"""Options of actors that the run sets itself, or that would let Ray repeat a peer."""


class EndKind(enum.Enum):
    """How a peer ended."""

    RETURNED = "returned"
    LEFT = "left"
    """The run had told it to leave."""
    RAISED = "raised"
    DIED = "died"
    NODE_LOST = "node lost"


class SlotAction(enum.Enum):
    """What follows the end of a peer."""

    FINISH = "finish"
    """The slot has its result."""
    REPLACE = "replace"
    ABANDON = "abandon"
    """The slot stays without a result."""
    FAIL = "fail"
    """The whole run ends."""


@dataclass(frozen=True, slots=True)
class PeerEnd:
    """The end of a peer.

    Attributes:
        kind: how it ended.
        lived_s: seconds since it began.
        is_late: whether it began after other peers: see ``is_late``.
    """

    kind: EndKind
    lived_s: float = 0.0
    is_late: bool = False


def is_late(replaced: int, waited_s: float) -> bool:
    """Whether a peer may find the run at its end, and then waits for members that have left.

    Args:
        replaced: number of earlier peers of its slot.
        waited_s: seconds between the begin of the run's first peer and its own.
    """
    return replaced > 0 or waited_s >= SETTLED_S


LATE_S = 60.0
"""How long a late peer may work after the first peer of the run has returned, in seconds."""


class SlotRestarts:
    """The ends of the peers of one slot, one after the other.

    Args:
        failures_max: number of failures in a row after which a new peer still starts.
    """

    def __init__(self, failures_max: int) -> None:
        self._failures_max = failures_max
        self.failures = 0

    def after(self, end: PeerEnd, *, is_ending: bool) -> tuple[SlotAction, float]:
        """Return what follows the end of a peer, and after how many seconds.

        Args:
            end: the end.
            is_ending: whether another peer has returned.
        """
        match end.kind:
            case EndKind.RETURNED:
                return SlotAction.FINISH, 0.0
            case EndKind.RAISED if is_ending and not end.is_late:
                return SlotAction.FAIL, 0.0
            case _ if is_ending:
                return SlotAction.ABANDON, 0.0
            case EndKind.LEFT | EndKind.NODE_LOST:
                return SlotAction.REPLACE, 0.0
            case _:
                self.failures = 1 + (self.failures if end.lived_s < SETTLED_S else 0)
                if self.failures > self._failures_max:
                    return SlotAction.FAIL, 0.0
                return SlotAction.REPLACE, min(PAUSE_S_MAX, PAUSE_S * 2 ** (self.failures - 1))


def peer_environment(
    slot: int,
    *,
    peers: int,
    master: str,
    token: str | None,
    drain_s: float,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment variables of a peer; those that the user gives take precedence.

    Args:
        slot: number of the peer, which its replacements keep.
        peers: number of slots of the run.
        master: address of the master.
        token: the run's secret; None: there is none.
        drain_s: seconds after SIGTERM in which a peer may still contribute its work.
        given: variables of the user.
    """
    secret = {} if token is None else {config.TOKEN: token}
    return {
        config.DRAIN: "1",
        config.DRAIN_S: f"{drain_s:g}",
        config.NAME: f"p{slot}",
        "PCCL_LOG": "info",
        **given,
        **secret,
        config.MASTER: master,
        config.PEERS: str(peers),
        PEER_INDEX: str(slot),
    }


def peer_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of the actors of peers: one CPU each, spread, unless the user says more.

    Raises:
        ValueError: an option that the run sets itself is given.
    """
    if taken := sorted(OURS & set(given or ())):
        raise ValueError(f"options: remove {', '.join(taken)}; RayRun sets this itself")
    return {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(given or {})}
