"""``pccl plan`` with a file of links."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from pccl.cli.runs.plan import plan
from tests.unit.observe.test_plan import MB, three


def test_a_file_is_planned(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps(three(5 * MB)), "utf-8")
    shown = CliRunner().invoke(plan, ["--file", str(file), "--sizes", "4KiB,64MiB"])
    assert shown.exit_code == 0, shown.output
    (row,) = [line for line in shown.output.splitlines() if line.split()[:2] == ["64", "MiB"]]
    # With equal shares two thirds of 67.1 MB at 5 MB/s; by the plan 1/27.5 s for each MB, and 2 %.
    times = row.replace(" *", "*").split()[6:10]
    assert times == ["2.53", "s*", "9.04", "s"]
    assert "shares in a mesh: 1 " in shown.output
    made = CliRunner().invoke(plan, ["--file", str(file), "--sizes", "64MiB", "--json"])
    found = json.loads(made.output)
    assert [member["peer"] for member in found["members"]] == [1, 2, 3]
    assert found["predictions"][0]["chosen"] == "mesh"
    assert found["unmeasured"] == 3  # directions
    assert not found["would_change"]


def test_members_of_a_site_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    near = three(1000 * MB)
    near["links"][0]["rtt_us"] = 300
    file.write_text(json.dumps(near), "utf-8")
    shown = CliRunner().invoke(plan, ["--file", str(file)])
    assert "a site in a mesh: 1, 2\n" in shown.output
    made = CliRunner().invoke(plan, ["--file", str(file), "--json"])
    assert json.loads(made.output)["sites"] == [[1, 2]]


def test_a_file_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    deep = "[" * 100_000
    for text, reason in (("{", "Expecting"), ("[]", 'a list "members"'), (deep, "recursion")):
        file.write_text(text, "utf-8")
        refused = CliRunner().invoke(plan, ["--file", str(file)])
        assert refused.exit_code == 1
        assert f"{file} is no matrix of links" in refused.output
        assert reason in refused.output


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    named = three(5 * MB)
    names = ("[/x]", "[red]b", ":smile:")
    named["members"] = [
        {**one, "name": name} for one, name in zip(named["members"], names, strict=True)
    ]
    file.write_text(json.dumps(named), "utf-8")
    shown = CliRunner().invoke(plan, ["--file", str(file)])
    assert shown.exit_code == 0, shown.output
    for name in names:
        assert f"({name})" in shown.output
