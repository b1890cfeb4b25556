"""What the runs of ``pccl.stress quality`` have shown, computed by hand."""

from __future__ import annotations

import math

import pytest

from pccl.stress.studies.quality_figures import Excess, QualityRun, excess, seen_in, table, verdict
from pccl.stress.studies.quality_grid import VARIANTS, Job, QualityVariant


def run(loss: float, *, tx_bytes: int = 0, largest: int = 0) -> QualityRun:
    return QualityRun(
        loss=loss,
        curve=((1000, loss),),
        tokens=1000,
        tx_bytes=tx_bytes,
        largest_tx_bytes=largest,
        averages=1,
        parameters=1,
        weights="0",
        seconds=60.0,
        cpu_s=90.0,
    )


# -- intervals -------------------------------------------------------------------------------------


def test_seeds_are_compared_pair_by_pair() -> None:
    found = excess([2.02, 1.02, 4.12], [2.0, 1.0, 4.0])  # 1, 2 and 3 percent
    assert found.each == pytest.approx((1.0, 2.0, 3.0))
    assert found.mean == pytest.approx(2.0)
    half = 4.303 / math.sqrt(3)  # their standard deviation is 1
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))


def test_an_interval_as_in_a_textbook() -> None:
    # Student's sleep data (1908, "The Probable Error of a Mean"), as R gives it for
    # t.test(extra ~ group, paired = TRUE): mean 1.58, 0.7001142 to 2.4598858.
    gained = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    also_gained = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    each = [b - a for a, b in zip(gained, also_gained, strict=True)]
    found = excess([1 + d / 100 for d in each], [1.0] * 10)
    assert found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=2e-4)


def test_one_seed_has_no_interval() -> None:
    found = excess([3.0], [2.0])
    assert found.mean == pytest.approx(50.0)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize(("losses", "others"), [([1.0], [1.0, 2.0]), ([], []), ([1.0] * 11,) * 2])
def test_what_cannot_be_compared_is_refused(losses: list[float], others: list[float]) -> None:
    with pytest.raises(ValueError, match=r"argument|seeds can be compared"):
        excess(losses, others)


@pytest.mark.parametrize(
    ("mean", "half", "compression", "said"),
    [
        (0.5, 0.4, "", "within"),
        (-3.0, 1.0, "", "within"),
        (0.5, 0.6, "", "within on average"),
        (1.5, 2.0, "", "not within"),
        (1.5, 2.0, "int4", "indistinguishable"),
        (1.5, 1.0, "int4", "not within"),
        (0.5, math.nan, "int4", "within on average"),
        (1.5, math.nan, "int4", "not within"),
    ],
)
def test_verdicts(mean: float, half: float, compression: str, said: str) -> None:
    found = Excess((mean,), mean, mean - half, mean + half)
    assert verdict(found, QualityVariant("sync", compression, "other", 1.0)) == said


# -- logs and tables -------------------------------------------------------------------------------


def test_a_log_is_read() -> None:
    seen = seen_in(
        [
            {"event": "OuterStep", "tx_bytes": 30},
            {"event": "Evaluated", "tokens": 512, "loss": 2.5},
            {"event": "InnerStep", "seconds": 1.0},
            {"event": "OuterStep", "tx_bytes": 50},
            {"event": "GradientsAveraged", "tx_bytes": 5},
            {"event": "StateSynced", "tx_bytes": 1000},
            {"event": "Evaluated", "tokens": 1024, "loss": 2.25},
        ]
    )
    assert seen == {
        "loss": 2.25,
        "curve": ((512, 2.5), (1024, 2.25)),
        "tokens": 1024,
        "tx_bytes": 85,
        "largest_tx_bytes": 50,
        "averages": 3,
    }


def test_a_log_without_losses_is_refused() -> None:
    with pytest.raises(ValueError, match="no held-out loss"):
        seen_in([{"event": "Evaluated", "tokens": 512, "loss": None}])


def test_variants_are_compared_with_what_they_claim() -> None:
    runs = {
        "data-parallel": {1: run(2.0, tx_bytes=8000), 2: run(4.0, tx_bytes=8000)},
        "sync": {1: run(2.02, tx_bytes=100, largest=20), 2: run(4.12, tx_bytes=60, largest=30)},
        "streaming-int4": {1: run(3.0, tx_bytes=10)},  # streaming itself was not trained
    }
    usual, sync, lone = table(runs, VARIANTS, "data-parallel")
    assert (usual.loss, usual.excess, usual.bytes_per_token, usual.fewer_bytes) == (3.0, None, 8, 1)
    assert (usual.seconds, usual.cpu_s) == (120.0, 180.0)
    assert (sync.against, sync.limit) == ("data-parallel", 2.0)
    assert sync.excess is not None
    assert sync.excess.each == pytest.approx((1.0, 3.0))
    half = 12.706 * math.sqrt(2) / math.sqrt(2)
    assert (sync.excess.low, sync.excess.high) == pytest.approx((2 - half, 2 + half))
    assert sync.bytes_per_token == pytest.approx(0.08)
    assert sync.fewer_bytes == pytest.approx(100.0)
    assert (sync.largest_tx_bytes, sync.seeds) == (30, (1, 2))
    assert (lone.against, lone.excess, lone.verdict) == ("", None, "")
    assert lone.fewer_bytes == pytest.approx(800.0)


# -- what is trained -------------------------------------------------------------------------------


def test_every_claim_is_about_a_variant() -> None:
    against = {name: variant.against for name, variant in VARIANTS.items()}
    assert [name for name, other in against.items() if not other] == ["data-parallel"]
    assert set(against.values()) <= {*VARIANTS, ""}


def test_variants_differ_in_nothing_but_what_they_are() -> None:
    job = Job(
        peers=2,
        steps=100,
        sync_every=20,
        width=64,
        layers=2,
        batch=4,
        context=128,
        warm_up=10,
        evaluate_every=50,
        held_out=64,
    )
    plain = job.arguments(VARIANTS["streaming"], 3)
    assert job.arguments(VARIANTS["streaming-int4"], 3) == [*plain, "--compression", "int4"]
    given = dict(zip(plain[::2], plain[1::2], strict=True))
    assert given["--mode"] == "streaming"
    assert given["--seed"] == "3"
    assert (given["--steps"], given["--sync-every"], given["--evaluate-every"]) == (
        "100",
        "20",
        "50",
    )
