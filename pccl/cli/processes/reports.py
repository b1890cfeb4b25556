"""What worker processes report: a dataclass on each line of their stdout, as a JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from pccl.errors import PCCLError


class WorkerReport(Protocol):
    """A dataclass of numbers, texts, and tuples of these."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


FAILURES = (PCCLError, ImportError, OSError, RuntimeError, ValueError)
"""What a worker gives as its reason: a run that was lost, no memory, nothing to compare with."""

R = TypeVar("R", bound=WorkerReport)


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot do its task, for a reason that it understands."""

    reason: str


@dataclass(frozen=True, slots=True)
class Doing:
    """What the worker is about; for people, and nothing is kept of it."""

    text: str


def encode(report: WorkerReport) -> str:
    """One line of JSON, without the line end."""
    values = dataclasses.asdict(report)
    return json.dumps({"report": type(report).__name__, **values})


def decode(line: str, kinds: Collection[type[R]]) -> R | None:
    """The report that a line holds, or None for any other output.

    Args:
        line: of a worker.
        kinds: what it may be.
    """
    try:
        values: Any = json.loads(line)
        kind = {kind.__name__: kind for kind in kinds}[values.pop("report")]
        for name in values:
            values[name] = tuple(values[name]) if type(values[name]) is list else values[name]
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def say(report: WorkerReport) -> None:
    """Tell the command that started this process. Any thread: a line is written at once."""
    sys.stdout.write(encode(report) + "\n")
    sys.stdout.flush()


def work(kind: type[R], run: Callable[[R], None]) -> None:
    """Do the task that is the one argument; a reason not to is reported, and the status is 1."""
    task = decode(sys.argv[1], (kind,))
    assert task is not None, "started by hand, with another argument"
    try:
        run(task)
    except FAILURES as error:
        say(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
