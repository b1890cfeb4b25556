"""What users see, as text: names, signatures, errors, environment, commands, wire version.

A change of ``surface.txt`` is a change for users. If it is meant, ``python -m
tests.packaging.test_surface`` writes the new one, and the changelog says so.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import pccl.errors
from pccl.cli.main import group
from pccl.protocol.limits import PROTOCOL_VERSION
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

KEPT = Path(__file__).with_name("surface.txt")
PUBLIC = (
    "pccl", "pccl.aio", "pccl.checkpoint", "pccl.config", "pccl.cuda", "pccl.errors",
    "pccl.inquiry", "pccl.master_node", "pccl.progress", "pccl.publishing", "pccl.shared_state",
    "pccl.bindings.data", "pccl.bindings.diloco", "pccl.bindings.events",
    "pccl.bindings.gradient_averager", "pccl.torch", "pccl.bindings.consumers",
    "pccl.bindings.status_line", "pccl.bindings.trackers",
    "pccl.observe.events", "pccl.observe.listeners", "pccl.observe.logs",
)  # fmt: skip
COLUMNS = 100
_VARIABLE = re.compile(r"\bPCCL_[A-Z_]+[A-Z]\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_HOME = re.compile(r"<class '([\w.]+\.)?(\w+)'>|\b(?:[a-z_]\w*\.)+([A-Z]\w*)")
"""Where a class lives is no matter of users."""


def surface() -> str:
    """All of it."""
    parts = [*_modules(), *_errors(), *_environment(), *_commands(group, "pccl")]
    return "\n".join([f"wire version {PROTOCOL_VERSION}", *parts, ""])


def _modules() -> Iterator[str]:
    for name in PUBLIC:
        module = importlib.import_module(name)
        yield f"\nmodule {name}"
        for public in sorted(getattr(module, "__all__", [])):
            yield from _thing(public, getattr(module, public))


def _thing(name: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        yield f"  enum {name}: " + ", ".join(f"{one.name}={one.value}" for one in thing)
    elif inspect.isclass(thing):
        yield f"  class {name}{_signature(thing)}"
        for member, value in sorted(inspect.getmembers(thing)):
            if not member.startswith("_") and _is_ours(thing, member):
                yield f"    {member}{_signature(value) if callable(value) else ''}"
    elif callable(thing):
        yield f"  def {name}{_signature(thing)}"
    else:
        yield f"  {name}"


def _is_ours(kind: type[Any], member: str) -> bool:
    owner = next((base for base in kind.__mro__ if member in vars(base)), None)
    return owner is not None and owner.__module__.startswith("pccl")


def _signature(thing: Any) -> str:
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    return _HOME.sub(lambda found: found[2] or found[3], _ADDRESS.sub("", text))


def _errors() -> Iterator[str]:
    yield "\nerrors"
    for name, kind in sorted(vars(pccl.errors).items()):
        if inspect.isclass(kind) and issubclass(kind, pccl.errors.PCCLError):
            bases = ", ".join(base.__name__ for base in kind.__mro__[1:-1])
            yield f"  {name}: code {getattr(kind, 'code', None)!r}; is a {bases}"


def _environment() -> Iterator[str]:
    yield "\nenvironment"
    found: set[str] = set()
    for room in ("pccl", "transports", "bindings"):
        for path in (ROOT / room).rglob("*.py"):
            found.update(_VARIABLE.findall(path.read_text(encoding="utf-8")))
    yield from (f"  {name}" for name in sorted(found))


def _commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[str]:
    context = click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=COLUMNS,
        max_content_width=COLUMNS,
        **command.context_settings,
    )
    yield f"\ncommand {context.command_path}"
    yield from (f"  {line}".rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None:
                yield from _commands(found, inner, context)


def test_what_users_see_has_not_changed() -> None:
    command = [sys.executable, "-m", __name__, "--print"]  # click keeps what tests have called
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=LIMIT_S)
    kept, now = KEPT.read_text(encoding="utf-8"), done.stdout.decode()
    changes = difflib.unified_diff(kept.splitlines(), now.splitlines(), "before", "now", n=1)
    assert kept == now, "\n".join(changes)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.buffer.write(surface().encode())
    else:
        KEPT.write_text(surface(), encoding="utf-8")
