"""Processes that train with DiLoCo, in the simulator: no inner step is lost, none counts twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pccl.protocol.types import WireFormat
from pccl.stress.sim.faults.base import MASTER, MS, LifePhase
from pccl.stress.sim.faults.between import Partition
from pccl.stress.sim.faults.kills import Kill
from pccl.stress.sim.faults.processes import Freeze
from pccl.stress.sim.planted import planted
from pccl.stress.sim.runner import Verdict, run_scenario, run_training_seed
from pccl.stress.sim.scenarios.scenario import TIMINGS, Scenario
from pccl.stress.sim.scenarios.to_train import draw_to_train
from pccl.stress.sim.workloads.training_plan import Mode

SEEDS = range(20)
"""Seeds that each run of the tests plays without a planted bug."""

CAUGHT_BY = {
    "contributors_kept_back": 7,
    "doubt_taken_for_applied": 26,
    "doubt_taken_for_lost": 7,
    "flights_forgotten": 26,
    "lost_lease_unnoticed": 21,
    "residual_advances_always": 24,
    "residual_stays": 7,
    "samples_of_lost_members_done": 0,
}
"""A seed that shows each planted bug."""


def test_no_seed_breaks_a_promise() -> None:
    done: Counter[str] = Counter()
    modes: set[Mode] = set()
    rounds_by_shards: Counter[int] = Counter()
    for seed in SEEDS:
        verdict = run_training_seed(seed)
        assert verdict.violation is None, (seed, verdict.violation)
        assert verdict.scenario.training is not None
        modes.add(verdict.scenario.training.mode)
        rounds_by_shards[verdict.scenario.training.shards] += verdict.done.get("round", 0)
        done.update(verdict.done)
    assert modes == set(Mode)
    assert done["round"] > 300
    assert rounds_by_shards[2] > 100
    assert done["training sync"] > 300
    assert done["round alone"] > 10
    assert done["residuals checked"] > 20
    assert done["buffers"] > 100
    assert done["inner state fetched"] > 0
    assert done["training: Evicted"] > 0
    assert done["halves contributed"] > 0
    assert done["wait interrupted"] > 0
    assert done["checkpoint loaded"] > 0
    assert done["idle round"] > 50
    assert done["samples lost to others"] > 0


def play(seed: int) -> Verdict:
    """Run a recorded seed, whose rounds wait for all processes, which all stay."""
    return run_scenario(draw_to_train(seed, quorums=False, drains=False))


def quiet(mode: Mode) -> Scenario:
    """Some processes that train in this mode, and nothing goes wrong."""
    for seed in range(1000):
        drawn = draw_to_train(seed, quorums=False, drains=False)
        training = drawn.training
        assert training is not None
        if training.mode is mode and drawn.peers > 2 and not drawn.late_peers:
            training = replace(
                training, min_peers=1, step_ns=MS, sync_s=min(training.sync_s, 0.003)
            )
            return replace(
                drawn,
                faults=(),
                settles_ns=0,
                standby=False,
                latency_ns=MS,
                uneven_links=False,
                stop_ns=250 * MS,
                training=training,
            )
    raise AssertionError(f"no seed trains in mode {mode}")


@pytest.mark.parametrize("mode", Mode)
def test_a_quiet_run_in_every_mode(mode: Mode) -> None:
    verdict = run_scenario(quiet(mode))
    assert verdict.violation is None
    assert verdict.done["round"] > 5
    assert verdict.done.get("training: Evicted", 0) == 0


@pytest.mark.parametrize("phase", [LifePhase.ROUND, LifePhase.DONE, LifePhase.REDUCE_SCATTER])
@pytest.mark.parametrize("mode", [Mode.SYNCHRONOUS, Mode.STREAMING])
def test_a_death_in_every_phase(mode: Mode, phase: LifePhase) -> None:
    scenario = quiet(mode)
    # The sixth time, so that others have what it has: they would wait for it.
    kill = Kill(0, phase, 6, 0, back_after_ns=scenario.latency_ns)
    verdict = run_scenario(replace(scenario, faults=(kill,)))
    assert verdict.violation is None
    assert sum(verdict.kills.values()) == 1
    assert verdict.done["round"] > 5


@pytest.mark.parametrize(
    "seed",
    [
        11,  # who dropped its work, as a guard had excluded some, counted it in the next weight
        30790,  # large packets vanished, and lanes were replaced before a sender could tell
        30899,  # a source answered on a lane whose end it had not seen, and was asked no more
        31520,  # a peer behind a NAT had a dead link, and nothing to send on it
        82,  # a round was lost with the run that it belonged to, and its work taken for applied
        125,  # without its majority a master went on with a newcomer, and the checker blamed it
        245,  # who was cut off was refused once, and gave up
        301,  # nobody could give the shared state for a while, and who lacked it gave up
        596,  # who had all of the work was frozen, and the run began anew with a newcomer
        602,  # all members had left, and who had replayed their rounds lost to who had nothing
        698,  # the second of two restarted masters gave out lower ids, and refused a newcomer
        85,  # a run that had lost its last member waited for a majority, and a newcomer for it
        1564,  # one run had only begun, and its beginning won over what another run had trained
        993,  # the last member was killed while its control connection was half open
        21133,  # a new master trusted the norm of a peer that the last one had flagged
        21470,  # residuals of a round of little work added 0.7 to one of much work
        21531,  # a member returned to a new master from elsewhere, and was dialled as before
        21595,  # in the next run another peer had its id, and its work was taken for applied
        21612,  # a test of a young run was taken for one of a peer of the older run
        21666,  # a relay was killed, and members had too little time to meet at another one
        40429,  # who was frozen before its work was reduced took it for applied, as it was old
        40751,  # a new machine's master told of a removal before its clock began, unreadably
        410232,  # of two outcomes in a checkpoint the checker took the second one for lost
        60112,  # a residual lost a share in a round that a guard kept it out of
        60134,  # a sparse reduce gave up a link before both ends had dialled again
        343,  # likewise, as one end had not yet seen that the link was gone
        821060,  # a frozen member read a dead master's words, and the checker minded
        830325,  # a report on a connection that was lost before the run was known counted, too
        831299,  # a dead master's last words, of a beginning that nobody alive knew
        831337,  # a sparse reduce blamed the links of a member that was dead behind a partition
        830865,  # two masters took their time to recover, one after the other
        830473,  # a newcomer wrote a late member's old state over its checkpoint, and was alone
    ],
)
def test_what_has_failed_once(seed: int) -> None:
    assert play(seed).violation is None


@pytest.mark.parametrize("seed", [289, 506])
def test_a_map_that_takes_long_arrives(seed: int) -> None:
    """In narrow windows it took longer than silence is borne, and nobody ever received it."""
    drawn = draw_to_train(seed, quorums=False, drains=False)
    verdict = run_scenario(replace(drawn, faults=(), window_bytes=600))
    assert verdict.violation is None
    assert verdict.done["round"] > 5


def all_but_one_frozen(seed: int, eighths: float) -> Scenario:
    """They are removed, and come back to the one."""
    drawn = draw_to_train(seed, quorums=False, drains=False)
    when_ns = round(drawn.stop_ns / 8 * eighths)
    return replace(
        drawn,
        faults=tuple(Freeze(when_ns + i, i, 6000 * MS) for i in range(drawn.peers - 1)),
        timing=TIMINGS["quick"],
        standby=False,
        late_peers=1,
        settles_ns=20_000 * MS,
        machine_size=1,
    )


def without_extras(scenario: Scenario) -> Scenario:
    """The faults come at moments of a run without them."""
    assert scenario.training is not None
    return replace(scenario, training=replace(scenario.training, extras=False))


def test_who_hears_late_of_the_beginning_of_a_run_has_not_begun_it_anew() -> None:
    """The only member is frozen, too; the one begins, and they come back to it."""
    scenario = all_but_one_frozen(16, 1)
    verdict = run_scenario(scenario)
    assert verdict.violation is None
    assert verdict.done["removed alive"] > 0
    assert verdict.endings == {"finished": scenario.peers}


def test_a_round_that_one_has_opened_is_called_off_by_most() -> None:
    """They come back with what all had before the one opened the round: only that is taken back."""
    scenario = without_extras(all_but_one_frozen(4, 5.0))
    verdict = run_scenario(scenario)
    assert verdict.violation is None
    assert verdict.done["round called off"] == 1
    assert verdict.done["run given up"] == 0
    assert verdict.done["round"] > 5
    assert verdict.endings == {"finished": scenario.peers}


def test_who_missed_a_round_does_not_take_it_back() -> None:
    """Most are frozen; the others commit a round, and are frozen before they synchronize."""
    drawn = draw_to_train(4, quorums=False, drains=False)
    assert drawn.training is not None
    training = replace(
        drawn.training,
        mode=Mode.DELAYED,
        fragments=1,
        sync_steps=4,
        sync_s=0.0,
        delay=1,
        min_peers=2,
        step_ns=19_336_171,
        extras=False,
    )
    most = [Freeze(2480 * MS, peer, 6520 * MS) for peer in (0, 1, 2)]
    rest = [Freeze(4890 * MS, peer, 4110 * MS) for peer in (3, 4)]
    scenario = replace(
        drawn,
        peers=5,
        late_peers=0,
        machine_size=1,
        site_size=1,
        latency_ns=40 * MS,
        training=training,
        faults=(*most, *rest),
        timing=TIMINGS["quick"],
        standby=False,
        stop_ns=4990 * MS,
        settles_ns=20_000 * MS,
    )
    verdict = run_scenario(scenario)
    assert verdict.violation is None
    assert verdict.done["run given up"] == 0
    assert verdict.endings == {"finished": 5}
    with planted("rounds_not_counted"):
        verdict = run_scenario(scenario)
    assert verdict.violation is not None
    assert "reverted the contents of peer" in verdict.violation


def test_the_work_of_a_run_is_waited_for() -> None:
    """Who holds it is away while the others ask for it."""
    verdict = play(1)
    assert verdict.done["waits for a holder"] > 0
    assert verdict.done["run given up"] == 0


def cut_off(after_ms: int) -> Scenario:
    """A peer loses its master while compressed rounds go on."""
    scenario = quiet(Mode.SYNCHRONOUS)
    assert scenario.training is not None
    return replace(
        scenario,
        timing=TIMINGS["quick"],
        training=replace(scenario.training, wire=WireFormat.FLOAT16),
        faults=(Partition(after_ms * MS, 0, MASTER, 6000 * MS),),
        settles_ns=20_000 * MS,
    )


def test_what_was_owed_in_a_round_in_doubt_is_paid_once() -> None:
    """The others commit a round with a peer that is lost before it hears of that."""
    for scenario in map(cut_off, range(54, 84, 2)):
        verdict = run_scenario(scenario)
        assert verdict.violation is None
        if "residual void" in verdict.done:
            break
    else:
        raise AssertionError("none of these cuts comes at the right moment")
    assert verdict.done["residual void"] == 1
    assert verdict.done["residuals checked"] > 10
    with planted("residual_paid_twice"):
        verdict = run_scenario(scenario)
    assert verdict.violation is not None
    assert "residual may have been added already" in verdict.violation


@pytest.mark.parametrize(
    ("bug", "seed", "wire"),
    [
        ("residual_advances_always", 36, WireFormat.SPARSE),
        ("residual_advances_always", 114, WireFormat.INT8),
        ("residual_stays", 21, WireFormat.SPARSE),
        ("residual_stays", 15, WireFormat.INT4),
    ],
)
def test_a_planted_bug_is_seen_in_coarse_rounds(bug: str, seed: int, wire: WireFormat) -> None:
    verdict = play(seed)
    assert verdict.ok
    assert verdict.scenario.training is not None
    assert verdict.scenario.training.wire is wire
    assert verdict.done["quantized"] > 0
    with planted(bug):
        verdict = play(seed)
    assert verdict.violation is not None
    assert "residual" in verdict.violation


@pytest.mark.parametrize("bug", sorted(CAUGHT_BY))
def test_a_planted_bug_is_seen(bug: str) -> None:
    seed = CAUGHT_BY[bug]
    assert play(seed).ok, "the seed is clean without the bug"
    with planted(bug):
        verdict = play(seed)
    assert verdict.violation is not None
    assert not verdict.violation.startswith("TypeError"), "the bug no longer fits the library"
    assert verdict.story


def leaving(mode: Mode) -> Scenario:
    """A quiet run with rounds that are rare, in which some processes get notice."""
    drawn = quiet(mode)
    assert drawn.training is not None
    sync_s = 0.2 if mode is Mode.BUDGET else 0.0
    training = replace(drawn.training, sync_steps=0 if sync_s else 60, sync_s=sync_s)
    training = replace(training, stops=0.0, drains=0.5, shards=1)
    return replace(drawn, groups=1, site_size=1, training=training)


@pytest.mark.parametrize("mode", Mode)
def test_processes_that_get_notice_hand_over_their_work_before_the_next_round(mode: Mode) -> None:
    verdict = run_scenario(leaving(mode))
    assert verdict.violation is None
    assert verdict.done["drained"] > 0
    assert verdict.done["round for a leaving process"] > 0
    assert verdict.done.get("training: Evicted", 0) == 0


def test_members_that_do_not_hear_of_a_leaving_process_are_seen() -> None:
    with planted("leaving_not_told"):
        verdict = run_scenario(leaving(Mode.SYNCHRONOUS))
    assert verdict.violation is not None
    assert "leaves, and waits" in verdict.violation


def test_work_that_a_leaving_process_leaves_behind_is_seen() -> None:
    with planted("work_left_behind"):
        verdict = run_scenario(leaving(Mode.SYNCHRONOUS))
    assert verdict.violation is not None
    assert "is left over at the end" in verdict.violation


def test_shards_with_a_quorum_admit_newcomers_between_rounds() -> None:
    """A replica is two processes, one in each group, and all must agree which round is the next."""
    done: Counter[str] = Counter()
    for seed in (6, 144, 161, 290, 490, 1045):
        drawn = draw_to_train(seed)
        assert drawn.training is not None
        assert (drawn.training.shards, drawn.late_peers) == (2, 2), seed
        assert drawn.quorum is not None
        verdict = run_scenario(drawn)
        assert verdict.violation is None, (seed, verdict.violation)
        done.update(verdict.done)
    assert done["round"] > 50
    assert done["admission between rounds"] > 5


def test_a_seed_gives_the_same_trace() -> None:
    digests = {run_training_seed(3).trace_digest for _ in range(2)}
    assert len(digests) == 1
