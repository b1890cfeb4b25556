"""The rooms and the one direction of dependency, enforced on the syntax tree of every module.

Pure rooms touch no clock, network, thread or randomness; every import of ours goes the way of the
table ``MAY_USE``; sockets stay in ``transports/``. A rule is a function of one syntax tree, so each
is also shown to fire on a line that breaks it.
"""

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

FOLDERS = ("pccl", "transports", "bindings", "stress")

API = "public API"
"""The room of the modules that lie in pccl/ itself: what users import."""
VOCABULARY = "public vocabulary"
"""Those of them that both faces are made with."""
_VOCABULARY = frozenset(
    [
        "addresses",
        "checkpoint",
        "checks",
        "config",
        "cuda",
        "descriptors",
        "error_feedback",
        "errors",
        "progress",
        "shared_state",
    ]
)

PURE = frozenset({"protocol", "collectives", "state", "topology", "telemetry", "machines"})
BELOW_API = PURE | {"transports", "runtime"}
PUBLIC = BELOW_API | {VOCABULARY, "observe", "_api", API}
EVERYTHING = PUBLIC | {
    *("bindings", "torch", "stress", "emulator", "cli", "demo peer", "bench network"),
}

MAY_USE: dict[str, frozenset[str]] = {
    "protocol": frozenset({"protocol"}),
    "collectives": frozenset({"collectives", "protocol"}),
    "state": frozenset({"state", "protocol"}),
    "topology": frozenset({"topology", "protocol"}),
    "telemetry": frozenset({"telemetry", "protocol"}),
    "machines": frozenset({"machines", "telemetry", "topology", "state", "protocol"}),
    "transports": frozenset({"transports", "protocol"}),
    "runtime": BELOW_API,
    VOCABULARY: BELOW_API | {VOCABULARY},
    "observe": BELOW_API | {VOCABULARY, "observe"},
    "_api": BELOW_API | {VOCABULARY, "observe", "_api"},
    API: PUBLIC,
    "bindings": frozenset({"bindings", "observe", API, VOCABULARY}),
    "torch": frozenset({"bindings"}),
    "stress": EVERYTHING,
    "emulator": EVERYTHING,
    "cli": frozenset({"cli", "observe", API, VOCABULARY}),
    "demo peer": frozenset({"cli", "observe", API, VOCABULARY, "bindings"}),
    "bench network": frozenset({"cli"}),
}
MAY_USE_WHEN_CALLED: dict[str, frozenset[str]] = {"cli": frozenset({"stress"})}
"""Allowed as well inside a function's body, so that only the command that needs it loads it."""

PUBLIC_ONLY = frozenset({"bindings", "torch", "cli", "demo peer"})
"""Rooms that are users like any other: no module of the API whose name starts with ``_``."""

CLOCK_AND_CHANCE = frozenset({"random", "secrets", "time"})
NETWORK = frozenset({"asyncio", "select", "selectors", "socket", "ssl", "uvloop"})
SYSTEM = frozenset({"importlib", "multiprocessing", "os", "signal", "subprocess"})
THREADS = frozenset({"_thread", "concurrent", "threading"})
IMPURE = CLOCK_AND_CHANCE | NETWORK | SYSTEM | THREADS
"""What a pure room does without."""

RESERVED: dict[str, frozenset[str]] = {
    "socket": frozenset({"transports", "emulator", "bench network"}),
    "threading": EVERYTHING - PURE - {"transports"},
}
"""Modules that only some rooms may import."""

NEVER_BARE = frozenset({"transports", "bindings", "stress"})
"""Importable only inside pccl: by the bare name would come a second copy of every class."""


class Import(NamedTuple):
    """One imported name: ``from pccl.protocol import frame`` names ``pccl.protocol.frame``."""

    line: int
    name: str
    relative: bool
    when_called: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def room(self) -> str | None:
        """The room of ours that the name lies in, or None if it is not ours."""
        if self.top != "pccl":
            return None
        parts = self.name.split(".")
        return room_of_name(parts[1]) if len(parts) > 1 else API


def room_of_name(name: str) -> str:
    """The room of what is called ``name`` in pccl/."""
    if name in MAY_USE:
        return name
    return VOCABULARY if name in _VOCABULARY else API


def imports(node: ast.AST, when_called: bool = False) -> Iterator[Import]:
    """Every import below a node, with whether it happens only when a function is called."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, alias.name, False, when_called)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                name = f"{child.module}.{alias.name}" if child.module else alias.name
                yield Import(child.lineno, name, child.level > 0, when_called)
        elif not isinstance(child, ast.expr):  # most nodes, and none of them holds an import
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, when_called or is_function)


def form_complaints(tree: ast.Module) -> Iterator[str]:
    """What no module may do, whatever its room, tests included."""
    for found in imports(tree):
        if found.relative:
            yield f"{found.line}: relative import of {found.name}"
        elif found.top in NEVER_BARE:
            yield f"{found.line}: {found.name} must be imported as pccl.{found.name}"


def purity_complaints(room: str, tree: ast.Module) -> Iterator[str]:
    """Imports from outside that the room must do without."""
    for found in imports(tree):
        if room in PURE and found.top in IMPURE:
            yield f"{found.line}: {found.name} in {room}, which is pure"
        elif room not in RESERVED.get(found.top, EVERYTHING):
            yield f"{found.line}: {found.name} is for {sorted(RESERVED[found.top])}, not {room}"


def direction_complaints(room: str, tree: ast.Module) -> Iterator[str]:
    """Imports of ours against the direction of dependency."""
    for found in imports(tree):
        if found.room is None:
            continue
        allowed = MAY_USE[room]
        if found.when_called:
            allowed |= MAY_USE_WHEN_CALLED.get(room, frozenset())
        if found.room not in allowed:
            yield f"{found.line}: {room} imports {found.name} of {found.room}"
        elif room in PUBLIC_ONLY and found.room in (API, VOCABULARY):
            parts = found.name.split(".")
            if len(parts) > 1 and parts[1].startswith("_") and not parts[1].startswith("__"):
                yield f"{found.line}: {room} imports {found.name}, which is private"


def python_files(folder: str) -> Iterator[Path]:
    """The Python files of a folder, relative to the root; links are not followed."""
    for where, subfolders, names in os.walk(ROOT / folder):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                yield (Path(where) / name).relative_to(ROOT)


def room_of(path: Path) -> str:
    """The room of a file: its folder in pccl/ or beside it; pccl/ itself is public.

    The link emulator is a network that the library does not know of, with sockets of its own; the
    rest of stress/ has none. A peer of the demo is a program of its own that needs torch anyway;
    the commands do without it, and so without the bindings. What the bench compares the library
    with has sockets of its own, and does without the library; so has what the doctor asks the
    kernel. What readers import is public.
    """
    if path.parts[:3] == ("pccl", "cli", "bench") and path.stem in {"namespace", "ring"}:
        return "bench network"
    if path.parts == ("pccl", "cli", "doctor", "network.py"):
        return "bench network"
    if path.parts == ("pccl", "cli", "demo", "peer.py"):
        return "demo peer"
    if path.parts[:2] == ("pccl", "publishing"):
        return API
    if path.parts[:2] == ("stress", "emulator"):
        return "emulator"
    if path.parts[0] != "pccl":
        return path.parts[0]
    return path.parts[1] if len(path.parts) > 2 else room_of_name(path.stem)


MODULES = {path: room_of(path) for folder in FOLDERS for path in python_files(folder)}


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path), filename=str(path))


def test_every_folder_has_its_rules() -> None:
    assert set(MODULES.values()) <= set(MAY_USE), "a new room needs its row in MAY_USE"


def test_imports_are_absolute_and_never_bare() -> None:
    paths = [*MODULES, *python_files("tests")]
    assert [f"{path}:{text}" for path in paths for text in form_complaints(parse(path))] == []


def test_pure_rooms_are_pure_and_sockets_and_threads_stay_in_theirs() -> None:
    found = [f"{p}:{t}" for p, room in MODULES.items() for t in purity_complaints(room, parse(p))]
    assert found == []


def test_imports_of_ours_go_one_way() -> None:
    found = [
        f"{p}:{t}" for p, room in MODULES.items() for t in direction_complaints(room, parse(p))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "complaints"),
    [
        ("from . import frame", 1),
        ("from ..protocol.frame import Header", 1),
        ("import transports", 1),
        ("from stress.sim import loop", 1),
        ("def later():\n    import bindings.diloco", 1),
        ("import pccl.transports\nfrom pccl.stress import sim\nimport stresslib", 0),
    ],
)
def test_form_rule_fires(source: str, complaints: int) -> None:
    assert len(list(form_complaints(ast.parse(source)))) == complaints


@pytest.mark.parametrize(
    ("room", "source", "complaints"),
    [
        *((room, f"import {name}", 1) for room in sorted(PURE) for name in sorted(IMPURE)),
        ("protocol", "from os import path", 1),
        ("protocol", "def now():\n    from time import monotonic_ns", 1),
        ("collectives", "import numpy as np\nimport struct, enum, timeit", 0),
        ("runtime", "import asyncio, os, threading, time", 0),
        ("runtime", "import socket", 1),
        ("stress", "from socket import AF_INET", 1),
        ("stress", "import threading", 0),
        ("emulator", "import socket, threading", 0),
        ("transports", "import asyncio, socket, ssl", 0),
        ("transports", "import threading", 1),
        ("bindings", "from threading import Lock", 0),
        (API, "import threading", 0),
    ],
)
def test_purity_rule_fires(room: str, source: str, complaints: int) -> None:
    assert len(list(purity_complaints(room, ast.parse(source)))) == complaints


@pytest.mark.parametrize(
    ("room", "source", "complaints"),
    [
        ("protocol", "from pccl.protocol import frame", 0),
        ("protocol", "from pccl.collectives.schedules.ring import Ring", 1),
        ("protocol", "import pccl", 1),
        ("protocol", "from pccl import errors", 1),
        ("collectives", "from pccl.protocol.types import Tag", 0),
        ("collectives", "from pccl.topology import cost_model", 1),
        ("transports", "from pccl.protocol.frame import Header", 0),
        ("transports", "from pccl import runtime", 1),
        ("runtime", "import pccl.transports.tcp, pccl.collectives.schedules.ring", 0),
        ("runtime", "from pccl.config import Limits", 1),
        ("runtime", "from pccl.stress.sim import loop", 1),
        (API, "from pccl.runtime import engine\nfrom pccl import errors", 0),
        (API, "def run():\n    from pccl.cli import main", 1),
        ("bindings", "import pccl\nfrom pccl import aio, __version__\nimport pccl.errors", 0),
        ("bindings", "from pccl.runtime import engine", 1),
        ("bindings", "from pccl._handles import Handle", 1),
        ("stress", "from pccl.runtime import engine\nimport pccl.cli.bench", 0),
        ("cli", "from pccl.aio import connect", 0),
        ("cli", "from pccl.runtime import engine", 1),
        ("cli", "from pccl.stress import chaos", 1),
        ("cli", "class Command:\n    from pccl.stress import chaos", 1),
        ("cli", "async def stress():\n    from pccl.stress import chaos", 0),
        ("cli", "from pccl.bindings import events", 1),
        ("demo peer", "from pccl.bindings import events\nfrom pccl.cli import demo_record", 0),
        ("demo peer", "from pccl.runtime import engine", 1),
    ],
)
def test_direction_rule_fires(room: str, source: str, complaints: int) -> None:
    assert len(list(direction_complaints(room, ast.parse(source)))) == complaints
