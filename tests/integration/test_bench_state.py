"""``pccl bench state`` as users run it: real processes, tiny states, few rounds."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from pccl.cli.main import group
from tests.integration.test_bench import ENVIRONMENT
from tests.support.commands import printed_objects


def measure(pccl: tuple[str, ...], *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects that a benchmark prints, by part and case."""
    found = printed_objects(*pccl, "bench", "state", "--json", *options, env=ENVIRONMENT)
    for figure in found:
        assert figure["values_ok"] is True
        assert figure["faults"] == []
    return {(figure["state"], figure["case"]): figure for figure in found}


def test_synchronizations(ready_pccl: tuple[str, ...]) -> None:
    found = measure(
        ready_pccl,
        *("--only", "sync", "--size", "4MiB", "--sources", "2", "--rounds", "2", "--warmup", "0"),
    )
    assert list(found) == [
        ("sync", case) for case in ("1 source", "2 sources", "1 source, 2 joiners")
    ]
    one, two, joiners = found.values()
    assert {figure["bytes"] for figure in found.values()} == {4 << 20}
    assert all(len(figure["seconds"]) == 2 for figure in found.values())
    assert one["source_cpu_s_per_gib"] > 0
    assert one["joiner_cpu_s_per_gib"] > 0
    assert one["joiner_extra_mib"] >= 3
    # All of it came, and none of it twice.
    assert [sum(each["tx_mib"]) for each in (one, two, joiners)] == [4, 4, 8]


def test_behind_emulated_uplinks(ready_pccl: tuple[str, ...]) -> None:
    found = measure(
        ready_pccl,
        *("--size", "1MiB", "--emulate", "rate=40mbit,rtt=2ms", "--sources", "1"),
        *("--rounds", "1", "--warmup", "0", "--compute", "0.02"),
    )
    assert list(found) == [
        *(("sync", case) for case in ("1 source", "1 source, 2 joiners")),
        *(("join", f"fetched {when}") for when in ("when admitted", "in the background")),
    ]
    assert found["sync", "1 source"]["seconds_median"] > 0.2  # 1 MiB takes that long at 40 Mbit/s
    at_once = found["join", "fetched when admitted"]
    assert at_once["first_sync_mib"] == 1
    assert found["join", "fetched in the background"]["first_sync_mib"] <= 1
    assert at_once["longest_s"] > 0.1  # two members have 80 Mbit/s
    assert at_once["conditions"]["plan"]["emulate"] == "rate=40mbit,rtt=2ms"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--only", "sync,everything"), "everything"),
        (("--size", "10"), "--size must be a multiple of 4 bytes"),
        (("--size", "1KiB"), "at least 4 KiB"),
        (("--size", "60GiB", "--sources", "16"), "take a smaller --size"),
        (("--emulate", "rate=fast"), "rate"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(group, ["bench", "state", *options])
    assert result.exit_code == 2
    assert complaint in result.output
    assert result.stdout == ""  # nothing is told of figures that will not come


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(group, ["bench", "state", "--help"])
    assert result.exit_code == 0
    assert "pccl bench state --only sync,join" in result.output
