"""The examples in docs/diloco.md do what the page says; its commands are right."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import get_args

import pytest

from pccl.bindings.events import Event, PeerReport
from tests.support.commands import launch_example, run_to_end
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PAGE = (ROOT / "docs" / "diloco.md").read_text(encoding="utf-8")
BY_HAND = re.findall(r"```python\n(.*?)```", PAGE.partition("## By hand")[2], re.DOTALL)


def test_consumers(tmp_path: Path) -> None:
    found = re.search(r"```python\n(import io\n.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1], encoding="utf-8")
    command = (sys.executable, "-W", "error", "example.py")
    ended = run_to_end(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, limit_s=LIMIT_S)
    assert (ended.stderr, ended.stdout) == ("", found[2])


def test_events_and_their_fields_are_listed() -> None:
    rows = dict(re.findall(r"^\| `([A-Z]\w+)` \|[^|]*\|(.*)\|$", PAGE, re.MULTILINE))
    for kind in set(get_args(Event)) - set(get_args(PeerReport)):
        names = [field.name for field in dataclasses.fields(kind) if field.name != "step"]
        assert re.findall(r"`(\w+)`", rows[kind.__name__]) == names


def test_commands_of_the_example_are_understood() -> None:
    pytest.importorskip("torch")
    from gpt.options import make_parser

    commands = re.findall(
        r"^(?:pccl launch -n 4 -- )?python examples/train_gpt\.py (.*)$", PAGE, re.M
    )
    modes = [make_parser().parse_args(shlex.split(words)).mode for words in commands]
    assert modes == ["alone", "data-parallel", "sync", "delayed", "streaming"]
    options = set(re.findall(r"`(--[a-z-]+)", PAGE.partition("## A real job")[2]))
    known = set(re.findall(r"--[a-z-]+", make_parser().format_help()))
    assert options - known == set()


def test_by_hand(tmp_path: Path, ready_python: tuple[str, ...]) -> None:
    """Ten outer steps, after which both have the same weights."""
    (program,) = BY_HAND
    lines = sorted(launch_example(program, tmp_path, python=ready_python).stdout.splitlines())
    (first, mine), (second, theirs) = (line.split("] ", 1) for line in lines)
    assert (first, second) == ("[p0", "[p1")
    assert re.match(r"10 tensor\(\[ ?-?\d", mine)
    assert mine == theirs
