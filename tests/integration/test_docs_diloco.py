"""docs/diloco-options.md lists the events of training; the commands of docs/diloco.md are right."""

from __future__ import annotations

import re
import shlex
from typing import get_args

import pytest

from pccl.bindings.events import Event, PeerReport
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "diloco.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "diloco-options.md").read_text(encoding="utf-8")


def test_events_are_listed() -> None:
    listed = re.findall(r"^- `([A-Z]\w+)`: ", OPTIONS.partition("## Events")[2], re.MULTILINE)
    assert set(listed) == {
        kind.__name__ for kind in set(get_args(Event)) - set(get_args(PeerReport))
    }


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
