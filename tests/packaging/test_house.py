"""How code in a room looks, enforced on the syntax tree of every module.

Each rule lists what breaks it today; a list may shrink, and its test fails when it could.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.test_rooms import FOLDERS, parse, python_files
from tests.support.paths import ROOT

MODULES_IN_A_FOLDER_MAX = 14
LINES_MAX = 500

LONG = {
    "pccl/machines/master/membership.py",
    "pccl/protocol/messages.py",
    "pccl/runtime/engine.py",
    "transports/link.py",
}
"""Files that have more lines."""

NAMED_TWICE = {
    "Communicator",  # blocking, and for asyncio: what users know
    "Subgroup",
}

CIRCLES: set[str] = set()
"""Protocols that one class of their room alone implements."""


TOPICS = {
    "unit": {
        "examples/test_gpt.py",
        "machines/master/succession/test_restart_sync.py",
        "machines/master/test_algorithms.py",
        "machines/peer/test_left_sync.py",
        "machines/peer/test_return.py",
        "test_error_codes.py",
        "test_names_of_pccl.py",
    },
    "property": {
        "test_decoders.py",
        "test_diloco_rounds.py",
        "test_hostile_frames.py",
        "test_hostile_messages.py",
        "test_hostile_state_frames.py",
        "test_masters.py",
        "test_twins.py",
        "test_weighted.py",
        "test_wire_formats.py",
    },
}
"""Tests of more than one module."""


def folders() -> Iterator[Path]:
    """Every folder with modules of ours."""
    found = {path.parent for room in FOLDERS for path in python_files(room)}
    yield from sorted(found)


def contents(folder: Path) -> set[str]:
    """Modules and packages of a folder, links to other rooms among them."""
    found: set[str] = set()
    for path in (ROOT / folder).iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            found.add(path.stem)
        elif path.is_dir() and (path / "__init__.py").is_file():
            found.add(path.name)
    return found


@cache
def classes() -> Mapping[str, tuple[tuple[Path, ast.ClassDef], ...]]:
    """Every class of ours by its name."""
    found: defaultdict[str, list[tuple[Path, ast.ClassDef]]] = defaultdict(list)
    for room in FOLDERS:
        for path in python_files(room):
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append((path, node))
    return {name: tuple(places) for name, places in found.items()}


def bases(node: ast.ClassDef) -> list[str]:
    """The names of a class's bases; none of those that are an attribute of something."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.id for base in plain if isinstance(base, ast.Name)]


@cache
def ancestors(name: str) -> frozenset[str]:
    """All classes that a class is below, as far as they are ours."""
    found: set[str] = set()
    for _, node in classes().get(name, ()):
        for base in bases(node):
            if base != name and base not in found:
                found |= {base, *ancestors(base)}
    return frozenset(found)


def depth(name: str) -> int:
    """How many classes of ours a class has above it, one above the other."""
    above = [base for _, node in classes().get(name, ()) for base in bases(node)]
    return max((1 + depth(base) for base in above if base in classes() and base != name), default=0)


@cache
def has(name: str) -> frozenset[str]:
    """What objects of a class have, by name: methods, fields, and what methods assign."""
    found: set[str] = set()
    for one in (name, *ancestors(name)):
        for _, node in classes().get(one, ()):
            for part in ast.walk(node):
                match part:
                    case ast.FunctionDef(name=member) | ast.AsyncFunctionDef(name=member):
                        found.add(member)
                    case ast.AnnAssign(target=ast.Name(id=member)):
                        found.add(member)
                    case ast.Attribute(value=ast.Name(id="self"), attr=member, ctx=ast.Store()):
                        found.add(member)
                    case _:
                        pass
    return frozenset(found)


@cache
def is_protocol(name: str) -> bool:
    return any("Protocol" in bases(node) for _, node in classes().get(name, ()))


def test_a_folder_says_what_is_in_it() -> None:
    """Its docstring is its chapter: every module and package, a line each, in reading order."""
    wrong = {}
    for folder in folders():
        text = ast.get_docstring(parse(folder / "__init__.py")) or ""
        told = re.findall(r"^\* ``(\w+)``: ", text, re.MULTILINE)
        if sorted(told) != sorted(contents(folder)):
            wrong[str(folder)] = set(told) ^ contents(folder) or "something is told twice"
    assert wrong == {}


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    counts = {str(folder): len(list((ROOT / folder).glob("[!_]*.py"))) for folder in folders()}
    assert {name: n for name, n in counts.items() if n > MODULES_IN_A_FOLDER_MAX} == {}


def test_files_stay_short() -> None:
    paths = [path for room in FOLDERS for path in python_files(room)]
    lines = {str(path): (ROOT / path).read_text("utf-8").count("\n") for path in paths}
    assert {path for path, count in lines.items() if count > LINES_MAX} == LONG


def test_a_class_name_says_one_thing() -> None:
    assert {name for name, places in classes().items() if len(places) > 1} == NAMED_TWICE


def test_parts_not_ancestors() -> None:
    """A base is an interface: nothing of ours is below what is below something of ours."""
    errors = {name for name in classes() if ancestors(name) & {"Exception", "OSError"}}
    library = {
        name for name, places in classes().items() if any(p.parts[0] != "stress" for p, _ in places)
    }
    assert {name for name in library - errors if depth(name) > 1} == set()


def test_no_protocol_hides_a_circle() -> None:
    found: set[str] = set()
    for name, places in classes().items():
        (path, _), *_ = places
        wanted = has(name) - {"__call__"}
        if not is_protocol(name) or not wanted or path.parts[0] == "stress":
            continue
        able = [c for c in classes() if wanted <= has(c) and not is_protocol(c)]
        room = path.parts[:2]
        if len(able) == 1 and classes()[able[0]][0][0].parts[:2] == room:
            found.add(f"{path} {name}")
    assert found == CIRCLES


@pytest.mark.parametrize("kind", ["unit", "property"])
def test_a_test_stands_where_its_module_does(kind: str) -> None:
    """And has its name: ``tests/unit/state/test_election.py`` tests ``pccl/state/election.py``."""
    parts = [p.with_suffix("").parts for room in FOLDERS for p in python_files(room)]
    parts += [folder.parts for folder in folders()]
    modules = {Path(*part[part[0] == "pccl" :]) for part in parts}
    tests = [
        p.relative_to(ROOT / "tests" / kind) for p in (ROOT / "tests" / kind).rglob("test_*.py")
    ]
    stray = {p for p in tests if p.parent / p.stem.removeprefix("test_") not in modules}
    assert {path.as_posix() for path in stray} == TOPICS[kind]
