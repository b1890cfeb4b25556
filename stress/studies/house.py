"""Measures the size of the source tree, and the Python calls of one all-reduce.

A profile function counts the calls of one of two peers in a warm all-reduce of 4 MB. It counts in
the caller's thread and in the I/O thread, and only functions of ``pccl``.
"""

from __future__ import annotations

import ast
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click
import numpy as np

import pccl
from pccl.cli.processes.crew import Crew
from pccl.cli.streams import writing

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pccl", "transports", "bindings", "stress")
COUNT = 1_000_000
"""Number of float32 elements."""
WARM, COUNTED = 5, 9
ARGUMENTS = frozenset(
    (
        "weight", "tag", "operand_descriptor", "quantization_options", "algorithm", "observable",
        "retry", "timeout_s",
    )
)  # fmt: skip
"""Keyword arguments of ``all_reduce``."""
LISTED_MIN = 5
"""Number of ``ARGUMENTS`` that a place must name to count as a copy of the list."""


class CallCounter:
    """Records calls of functions of ``pccl``, in this thread and all threads that start later."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self.counts = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.counts and event == "call" and _is_ours(frame.f_code.co_filename):
            self.calls.append(frame.f_code)

    def close(self) -> None:
        """Stop counting."""
        threading.setprofile(None)
        sys.setprofile(None)


def _is_ours(path: str) -> bool:
    return "/pccl/" in path or any(f"/{room}/" in path for room in SOURCES[1:])


@click.command("house")
def house() -> None:
    """Measure lines, words and class chains of the tree, and the calls of one warm all-reduce."""
    with writing():
        for name, value in (*_sizes(), *_path()):
            click.echo(f"{name:52} {value:>9}")


def _path() -> Iterator[tuple[str, int]]:
    counter = CallCounter()
    with Crew() as crew:
        crew.start("partner", "pccl.stress.studies.house", [])
        runs = _reduce(crew.first_lines(["partner"])["partner"], counter)
    counter.close()
    yield "calls of one warm all_reduce of 4 MB, median", int(statistics.median(map(len, runs)))
    functions = [len(set(run)) for run in runs]
    yield "functions among them, median", int(statistics.median(functions))
    files = [len({code.co_filename for code in run}) for run in runs]
    yield "files among them, median", int(statistics.median(files))


def _reduce(master: str, counter: CallCounter | None) -> list[list[CodeType]]:
    runs: list[list[CodeType]] = []
    with pccl.Communicator(master) as comm:
        comm.connect(min_peers=2)
        send, recv = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
        for number in range(WARM + COUNTED):
            if counter is not None:
                counter.counts = number >= WARM
            comm.all_reduce(send, recv)
            if counter is not None:
                counter.counts = False
                if number >= WARM:
                    runs.append(counter.calls)
                counter.calls = []
    return runs


def _sizes() -> Iterator[tuple[str, int]]:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in _files(*SOURCES)}
    yield "lines of source", _lines(trees)
    for room in SOURCES:
        yield f"  {room}", _lines(_files(room))
    yield "lines of tests", _lines(_files("tests"))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    guides = [page for page in pages if "decisions" not in page.parts]
    yield "words of README and docs, without decisions", _words(guides)
    yield "words of decisions", _words([page for page in pages if page not in guides])
    yield "classes in a chain deeper than one, without stress/", _chains(trees)
    yield "places that list the arguments of all_reduce", sum(map(_lists, trees.values()))


def _files(*rooms: str) -> list[Path]:
    found = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return [path for path in found if path.resolve() == path]


def _lines(paths: Sequence[Path] | dict[Path, ast.Module]) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in paths)


def _words(paths: Sequence[Path]) -> int:
    """Count tokens between spaces that have a letter or digit, so not the pipes of a table."""
    return sum(
        any(map(str.isalnum, token)) for path in paths for token in path.read_text("utf-8").split()
    )


def _chains(trees: dict[Path, ast.Module]) -> int:
    above: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "stress" not in path.relative_to(ROOT).parts:
                plain = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                above[node.name] = [base.id for base in plain if isinstance(base, ast.Name)]

    def depth(name: str) -> int:
        known = [base for base in above[name] if base in above and base != name]
        return max((1 + depth(base) for base in known), default=0)

    def is_error(name: str) -> bool:
        return any(base == "Exception" or is_error(base) for base in above.get(name, ()))

    return sum(depth(name) > 1 and not is_error(name) for name in above)


def _lists(tree: ast.Module) -> int:
    """Count signatures, calls and classes that name most of the arguments."""
    count = 0
    for node in ast.walk(tree):
        named: set[str | None] = set()
        match node:
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                named = {each.arg for each in (*args.args, *args.kwonlyargs)}
            case ast.Call(args=given, keywords=keywords):
                named = {each.arg for each in keywords}
                named |= {each.id for each in given if isinstance(each, ast.Name)}
            case ast.ClassDef(body=body):
                named = {
                    each.target.id
                    for each in body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
            case _:
                pass
        count += len(named & ARGUMENTS) >= LISTED_MIN
    return count


def _be_partner() -> None:
    """Run the master and the other peer, in this process."""
    with pccl.MasterNode("127.0.0.1:0") as node:
        print(node.address, flush=True)
        _reduce(node.address, None)


if __name__ == "__main__":
    _be_partner()
