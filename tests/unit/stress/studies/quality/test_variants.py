from __future__ import annotations

import pytest

from pccl.stress.studies.quality.variants import (
    MODES,
    baseline,
    tuned_as,
    uncompressed,
    variants,
)


def test_each_diloco_mode_gets_a_variant_for_each_format_and_number_of_replicas() -> None:
    made = variants(["data-parallel", "eager"], ["int8", "int4"], [2, 4])
    assert [variant.name for variant in made] == [
        "data-parallel",
        "eager",
        "data-parallel, 4 replicas",
        "eager, 4 replicas",
        "eager-int8",
        "eager-int4",
        "eager-int8, 4 replicas",
        "eager-int4, 4 replicas",
    ]
    assert all(variant.options()["min_peers"] == variant.replicas for variant in made)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="no mode 'fast'"):
        variants(["sync", "fast"], [], [2])


def test_a_variant_is_compared_with_what_it_changes_at_the_same_number_of_replicas() -> None:
    plain, coded = variants(["late"], ["int4"], [4])
    assert baseline(coded) == plain.name == "late, 4 replicas"
    assert uncompressed(coded) == plain
    assert baseline(plain) == "sync, 4 replicas"
    assert baseline(MODES["sync"]) == "data-parallel"
    assert baseline(MODES["data-parallel"]) is None


def test_data_parallel_has_no_outer_settings_to_tune() -> None:
    tuned = MODES["data-parallel"].tune(0.5, 0.7, 0.9)
    assert (tuned.lr, tuned.tuned[1:]) == (0.5, MODES["data-parallel"].tuned[1:])
    assert MODES["sync"].tune(0.5, 0.7, 0.9).tuned == (0.5, 0.7, 0.9)


def test_late_and_eager_differ_in_the_preview_alone() -> None:
    late, eager = MODES["late"].options(), MODES["eager"].options()
    outer = late.pop("outer"), eager.pop("outer")
    assert [one.args[1] for one in outer] == [0.0, 0.0]
    assert {key for key in late if late[key] != eager[key]} == {"eager"}
    assert late["delay"] == late["sync_every"]


def test_unequal_replicas_make_as_many_steps_together_as_equal_ones() -> None:
    (variant,) = variants(["unequal"], [], [4])
    assert [variant.pace(rank) for rank in range(4)] == [1, 1, 1, 4]
    assert variant.longest(3250) == 4000  # three replicas make 4000 steps, and one makes 1000
    assert variant.options()["sync_every"] == "20s"
    assert tuned_as(variant).name == baseline(variant) == "sync, 4 replicas"
    assert tuned_as(variant) == variants(["sync"], [], [4])[0]
    assert MODES["sync"].longest(3250) == 3250


def test_settings_of_equal_replicas_are_those_of_older_results() -> None:
    assert "slowest" not in MODES["sync"].settings()
    assert MODES["unequal"].settings()["slowest"] == 4
