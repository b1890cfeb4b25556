"""The manifests for clusters: they can be read, and every ``pccl`` command in them is one."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pccl.cli.main import group
from tests.support.paths import ROOT

HERE = re.compile(r"^\$\(.*|^\$\w+$")
"""An address that the shell or the program puts in."""

MANIFESTS = sorted((ROOT / "examples" / "clusters").iterdir())


def lists_in(node: Any) -> Iterator[list[Any]]:
    """All lists in a document, at any depth; lines of scripts are split into words."""
    if isinstance(node, str):
        yield from (shlex.split(line) for line in node.splitlines() if line.startswith("pccl "))
    parts: list[Any] = []
    if isinstance(node, dict):
        parts += node.values()
    if isinstance(node, list):
        parts += node
        yield parts
    for each in parts:
        yield from lists_in(each)


def commands_in(path: Path) -> list[list[str]]:
    """The ``pccl`` commands in a manifest or page."""
    text = path.read_text("utf-8")
    if path.suffix == ".yaml":
        found = list(lists_in(list(yaml.safe_load_all(text))))
    elif path.suffix == ".py":
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.List)]
        found = [[getattr(each, "value", "$each") for each in node.elts] for node in nodes]
    else:
        lines = re.findall(r"^(?:srun )?(pccl [^&\n`]*)", text, re.MULTILINE)
        found = [shlex.split(line) for line in lines]
    return [[str(word) for word in words] for words in found if words[:1] == ["pccl"]]


@pytest.mark.parametrize(
    "path", [*MANIFESTS, ROOT / "docs" / "clusters.md"], ids=lambda path: path.name
)
def test_commands_have_such_options(path: Path) -> None:
    commands = commands_in(path)
    assert len(commands) == {"kubernetes.yaml": 4, "clusters.md": 3}.get(path.name, 1), commands
    context = click.Context(group)
    for _, name, *arguments in commands:
        command = group.get_command(context, name)
        assert command is not None, name
        command.make_context(name, [HERE.sub("host:48148", each) for each in arguments])
