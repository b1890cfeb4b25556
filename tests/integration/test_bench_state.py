"""``pccl bench state`` as users run it: real processes, tiny states, few rounds."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from pccl.cli.bench.command import bench
from tests.integration.test_bench import ENVIRONMENT
from tests.support.commands import PCCL, printed_objects

COMMAND = (*PCCL, "bench", "state")


def measure(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects that a benchmark prints, by part and case."""
    found = printed_objects(*COMMAND, "--json", *options, env=ENVIRONMENT)
    for figure in found:
        assert figure["values_ok"] is True
        assert figure["faults"] == []
    return {(figure["state"], figure["case"]): figure for figure in found}


def test_on_loopback() -> None:
    found = measure(
        *("--only", "hashing,sync,unchanged,memory", "--size", "2MiB", "--sources", "2"),
        *("--rounds", "2", "--warmup", "0"),
    )
    assert list(found) == [
        *(("hashing", case) for case in ("pieces", "all_processors", "one_processor")),
        *(("sync", case) for case in ("plain copy", "plain copy, hashed", "1 source", "2 sources")),
        *(("unchanged", case) for case in ("everything hashed", "nothing touched")),
        *(("memory", case) for case in ("staged in memory", "staged on disk", "in place")),
    ]
    assert {figure["bytes"] for figure in found.values()} == {2 << 20}
    assert all(len(figure["seconds"]) == 2 for figure in found.values())
    pieces, reference = found["hashing", "pieces"], found["hashing", "all_processors"]
    expected = reference["seconds_median"] / pieces["seconds_median"]
    assert pieces["of_all_processors"] == pytest.approx(expected, rel=1e-3)
    one, two = found["sync", "1 source"], found["sync", "2 sources"]
    assert one["of_copy"] == pytest.approx(
        found["sync", "plain copy"]["seconds_median"] / one["seconds_median"], rel=1e-3
    )
    assert one["source_cpu_s_per_gib"] > 0
    assert one["joiner_cpu_s_per_gib"] > 0
    assert sum(two["tx_mib"]) == 2  # all of it came, and none of it twice
    assert found["memory", "staged in memory"]["joiner_extra_anonymous_mib"] >= 1.5


def test_behind_emulated_uplinks() -> None:
    found = measure(
        *("--only", "uplinks,join", "--uplink-size", "1MiB", "--uplink", "rate=40mbit,rtt=2ms"),
        *("--sources", "3", "--rounds", "1", "--warmup", "0", "--compute", "0.02"),
    )
    assert list(found) == [
        *(("uplinks", case) for case in ("1 source", "3 sources", "1 source, 2 joiners")),
        *(("join", f"fetched {when}") for when in ("when admitted", "in the background")),
    ]
    one, two = found["uplinks", "1 source"], found["uplinks", "1 source, 2 joiners"]
    assert one["seconds_median"] > 0.2  # 1 MiB takes that long at 40 Mbit/s
    assert sum(two["tx_mib"]) == 2
    expected = two["seconds_median"] / one["seconds_median"]
    assert two["times_one_joiner"] == pytest.approx(expected, rel=1e-3)
    at_once, before = (
        found["join", "fetched when admitted"],
        found["join", "fetched in the background"],
    )
    assert at_once["first_sync_mib"] == 1
    assert before["first_sync_mib"] <= 1
    assert at_once["longest_s"] > 0.1  # two members have 80 Mbit/s
    assert at_once["conditions"]["plan"]["uplink"] == "rate=40mbit,rtt=2ms"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--only", "sync,everything"), "everything"),
        (("--size", "10"), "--size must be a multiple of 4 bytes"),
        (("--uplink-size", "6KB", "--size", "1KiB"), "at least 4 KiB"),
        (("--size", "60GiB", "--sources", "16"), "take a smaller --size"),
        (("--uplink", "rate=fast"), "rate"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(bench, ["state", *options])
    assert result.exit_code == 2
    assert complaint in result.output
    assert result.stdout == ""  # nothing is told of figures that will not come


def test_help_has_examples() -> None:
    result = CliRunner().invoke(bench, ["state", "--help"])
    assert result.exit_code == 0
    assert "pccl bench state --only uplinks,join" in result.output
