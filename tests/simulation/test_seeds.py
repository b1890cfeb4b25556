"""The simulator inside ``make test``: many seeds, each phase of life hit by kills, no violation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from pccl.stress.sim.planted import PLANTED, planted
from pccl.stress.sim.runner import run_seed

PHASES = ("connecting", "round", "reduce_scatter", "gather", "done_before_commit")

WORKLOADS = (
    "CollectiveAborted",
    "DeadlineExceeded",
    "Interrupted",
    "LockstepError",
    "OutcomeUnknown",
    "ResyncRequired",
    "barrier",
    "broadcast",
    "handle",
    "lane cut",
    "of several",
)
"""What calls of every kind have come to: what the 400 seeds must not miss."""

CAUGHT_BY = {
    "commit_before_all_reported": 0,
    "dead_lane_unnoticed": 363,
    "lost_lane_forgotten": 3,
    "mistakes_undiagnosed": 37,
    "no_fencing": 0,
    "no_restore_after_completion": 18,
    "nothing_for_others_after_leaving": 20,
    "partly_sent_forgotten": 3,
    "second_copy_added": 0,
    "world_changes_unseen": 735,
    "write_after_return": 0,
}
"""A seed that shows each planted bug; ``--planted NAME`` searches for others."""


def simulate(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pccl.stress", "sim", "--json", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if result["failed"] else 0)
    return result


def test_no_seed_breaks_a_promise_and_every_phase_is_hit() -> None:
    result = simulate("--seeds", "0:400")
    assert result["violations"] == {}
    assert result["seeds"] == 400
    hits = {phase: result["kills"][phase] for phase in PHASES}
    assert all(count >= 20 for count in hits.values()), hits
    assert result["reduces"] > 5000
    assert result["aborts"] > 500
    counts = {what: result["done"][what] for what in WORKLOADS}
    assert all(count >= 20 for count in counts.values()), counts
    assert set(result["endings"]) >= {"finished", "killed", "master lost"}


def test_a_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    seeds = "40:80"
    one = simulate("--seeds", seeds, "--jobs", "1", PYTHONHASHSEED="1")
    other = simulate("--seeds", seeds, "--jobs", "2", PYTHONHASHSEED="4242")
    assert len(one["trace_digests"]) == 40
    assert one["trace_digests"] == other["trace_digests"]
    assert len(set(one["trace_digests"].values())) == 40


@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_a_planted_bug_is_seen(bug: str) -> None:
    seed = CAUGHT_BY[bug]
    assert run_seed(seed).ok, "the seed is clean without the bug"
    with planted(bug):
        verdict = run_seed(seed)
    assert not verdict.ok
    assert verdict.story


def test_the_same_command_replays_a_failure() -> None:
    with planted("write_after_return"):
        first = run_seed(CAUGHT_BY["write_after_return"])
        again = run_seed(CAUGHT_BY["write_after_return"])
    assert (first.violation, first.trace_digest) == (again.violation, again.trace_digest)


SEEDS_THAT_FOUND_BUGS = {
    87: "a caller who left after he was done took along what his neighbour still lacked",
    20: "the same, with several collectives in flight",
    3376: "who came late to what another one had withdrawn met the others' next attempt instead",
    1073: "a process that was killed while its communicator closed left a callback that raised",
}
"""What was found with earlier scenarios is planted instead, or has a test of its own."""


@pytest.mark.parametrize("seed", SEEDS_THAT_FOUND_BUGS)
def test_bugs_that_were_found_stay_away(seed: int) -> None:
    assert run_seed(seed).violation is None
