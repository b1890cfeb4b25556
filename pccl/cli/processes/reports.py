"""The reports of worker processes: a dataclass on each line of stdout, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from pccl.errors import PCCLError


class WorkerReport(Protocol):
    """A dataclass of numbers, strings, and tuples of these."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


FAILURES = (PCCLError, ImportError, OSError, RuntimeError, ValueError)
"""Errors that a worker reports as ``Failed``; with any other error it ends with a traceback."""

R = TypeVar("R", bound=WorkerReport)


@dataclass(frozen=True, slots=True)
class Failed:
    """The report of a worker that cannot do its task, with an error of ``FAILURES``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Doing:
    """The report of what a worker does now, for display only."""

    text: str


def encode(report: WorkerReport) -> str:
    """Return ``report`` as a line of JSON, without the line end."""
    values = dataclasses.asdict(report)
    return json.dumps({"report": type(report).__name__, **values})


def decode(line: str, kinds: Collection[type[R]]) -> R | None:
    """Return the report that a line holds; None for any other output.

    Args:
        line: a line of a worker's stdout.
        kinds: dataclasses of the reports that the caller expects.
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
    """Send ``report`` to the command that started this process. Any thread may call this."""
    sys.stdout.write(encode(report) + "\n")
    sys.stdout.flush()


def work(kind: type[R], run: Callable[[R], None]) -> None:
    """Run the task in ``sys.argv[1]``; on an error of ``FAILURES``, report it and exit with 1."""
    task = decode(sys.argv[1], (kind,))
    assert task is not None, "the argument is not a task; only the command starts this program"
    try:
        run(task)
    except FAILURES as error:
        say(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
