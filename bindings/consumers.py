"""Consumers of the events of a training run: a JSONL file, TensorBoard, one line on the terminal.

    from pccl.bindings.consumers import JsonlWriter, StatusLine

    with JsonlWriter("run.jsonl") as log, StatusLine() as line:
        opt = DiLoCo(model, inner=inner, comm=comm, on_event=[log, line])

Each consumer takes the events of :mod:`pccl.bindings.events`, those of the peer among them.
Consumers that write files also take dataclasses of the program, such as its losses:
``log(Evaluated(step=100, loss=1.7))``. If the disk is full or the folder is gone, such a direct
call raises. In ``on_event``, or in :class:`Listeners`, a consumer that raises is dropped, and its
error is logged once, with the file's name. The line on the terminal never raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from pccl.bindings.arguments import check_count
from pccl.bindings.events import Event, InnerStep, MembersChanged, OuterStep, TrainsAlone
from pccl.bindings.status_line import StatusLine
from pccl.checks import shown
from pccl.observe.events import SCHEMA, CallEnded, PeerReport
from pccl.observe.listeners import Listeners

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

IDS = ("group", "peer_id", "rank", "tag", "term")
"""Numbers in the events of a peer that are names, not amounts."""

__all__ = ["JsonlWriter", "Listeners", "ScalarWriter", "StatusLine", "TensorBoardWriter"]


class JsonlWriter:
    """Appends each event to a file as one line of JSON.

    ``{"event": "TrainsAlone", "time": "2026-03-01T12:00:00.250+00:00", "step": 700}``: the class,
    the wall clock (UTC, milliseconds), and the fields of the event under their own names. Events of
    the peer also have the version of their form, ``"schema": "1.1"``. JSON has no NaN and no
    infinity: both become null. The line is in the file when the call returns, so a
    killed process leaves complete lines. After a partial line (the machine failed), the next
    writer begins a new line.

    Args:
        path: path of the file, which is created or appended to. Its folder must exist.
        every_inner: write an :class:`~pccl.bindings.events.InnerStep` event only if its step is a
            multiple of this. All other events are written.

    Raises:
        OSError: the file cannot be opened or, when called, written.
        ValueError: ``every_inner`` is not at least 1; or, when called: the file has been closed.
        TypeError: ``every_inner`` is no int; or, when called: the event is no dataclass instance.
    """

    def __init__(self, path: str | PathLike[str], *, every_inner: int = 1) -> None:
        self._every_inner = check_count("every_inner", every_inner)
        self._path = Path(path)
        self._is_in_a_line = _lacks_line_end(self._path)
        self._file = self._path.open("ab", buffering=0)

    def __call__(self, event: Event | DataclassInstance) -> None:
        """Write the event as one line."""
        values = values_of(event)
        if self._file.closed:
            raise ValueError(f"the log {self._path} has been closed")
        if isinstance(event, InnerStep) and event.step % self._every_inner:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"event": type(event).__name__, "time": now}
        if isinstance(event, PeerReport):
            line["schema"] = ".".join(map(str, SCHEMA))
        for name, value in values.items():
            line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._write(json.dumps(line, allow_nan=False))

    def _write(self, text: str) -> None:
        """Append a new line. The file has no buffer, so that ``close`` has nothing to write."""
        rest = memoryview((("\n" if self._is_in_a_line else "") + text + "\n").encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
                self._is_in_a_line = bool(rest)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        self._file.close()

    def __repr__(self) -> str:
        return f"JsonlWriter({str(self._path)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lacks_line_end(path: Path) -> bool:
    """Whether the last line of this file is incomplete."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class ScalarWriter(Protocol):
    """The methods of ``torch.utils.tensorboard.SummaryWriter`` that this module calls."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Add one point to one curve."""
        ...

    def close(self) -> object:
        """Write the points that are still buffered, and close the writer."""
        ...


class TensorBoardWriter:
    """Draws each number of each event over the inner step.

    A curve's tag is the event's name and the field's, as in ``outer_step/exposed_s``. For peers it
    draws their number: ``group/members``, ``group/joined``, ``group/lost``,
    ``outer_step/contributors``. Norms have a curve for each fragment, as in
    ``outer_step/mean_norm/fragment_2``. It skips NaN and text, and the events of the peer, which
    have no step. An instance of a program's own
    dataclass needs an int ``step`` among its fields.

    Args:
        to: a folder, for a new ``SummaryWriter``, which ``close`` closes; or the program's own
            writer (any object with ``add_scalar``), which stays open.
        every_inner: as for :class:`JsonlWriter`.

    Raises:
        ImportError: a folder was given, and torch or tensorboard is not installed.
        ValueError: ``every_inner`` is not at least 1; or, when called: this has been closed.
        TypeError: ``to`` is neither a folder nor a writer; ``every_inner`` is no int; or, when
            called: the event is no dataclass instance with a step.
    """

    def __init__(self, to: str | PathLike[str] | ScalarWriter, *, every_inner: int = 1) -> None:
        self._every_inner = check_count("every_inner", every_inner)
        self._is_own = isinstance(to, str | PathLike)
        self._closed = False
        self._place = to
        self._has_failed = False
        if isinstance(to, str | PathLike):
            self._writer: ScalarWriter = _summary_writer()(str(Path(to)))
        elif callable(getattr(to, "add_scalar", None)):
            self._writer = to
        else:
            raise TypeError(f"TensorBoardWriter takes a folder or a SummaryWriter, not {shown(to)}")

    def __call__(self, event: Event | DataclassInstance) -> None:
        """Draw the numbers of the event."""
        values = values_of(event)
        if self._closed:
            raise ValueError("this TensorBoardWriter has been closed")
        if isinstance(event, PeerReport):
            return
        if isinstance(event, InnerStep) and event.step % self._every_inner:
            return
        step = values.get("step")
        if not isinstance(step, int):
            raise TypeError(f"{type(event).__name__} has no int field 'step', the x value")
        try:
            for tag, value in scalars(event).items():
                self._writer.add_scalar(tag, value, step)
        except Exception:
            self._has_failed = True
            raise

    def close(self) -> None:
        """Close the ``SummaryWriter``, if this object made it. Closing again does nothing.

        Raises:
            OSError: the buffered points cannot be written, and no earlier call has raised.
        """
        if self._is_own and not self._closed:
            self._closed = True
            try:
                self._writer.close()
            except OSError:
                if not self._has_failed:  # otherwise the program knows, and can do nothing more
                    raise
        self._closed = True

    def __repr__(self) -> str:
        return f"TensorBoardWriter({str(self._place) if self._is_own else self._place!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summary_writer() -> Callable[[str], ScalarWriter]:
    # Imported here, because the import takes a second, and tensorboard is an optional extra.
    try:
        from torch.utils import tensorboard
    except ImportError as error:
        raise ImportError(
            "TensorBoardWriter needs torch and tensorboard: pip install 'pccl[tensorboard]'"
        ) from error
    made: Callable[[str], ScalarWriter] = tensorboard.SummaryWriter
    return made


def scalars(event: Event | DataclassInstance) -> dict[str, float]:
    """Return the values that an event adds to curves, by the tags of the curves."""
    match event:
        case MembersChanged():
            peers = {"members": event.members, "joined": event.joined, "lost": event.lost}
            return {f"group/{name}": float(len(ids)) for name, ids in peers.items()}
        case TrainsAlone():
            return {"group/members": 1.0}
        case OuterStep(fragment=fragment):
            skipped, of_norms = {"step", "fragment"}, f"/fragment_{fragment}"
        case _:
            skipped, of_norms = {"step", *IDS} if isinstance(event, PeerReport) else {"step"}, ""
    family = event.call if isinstance(event, CallEnded) else _snake(type(event).__name__)
    found: dict[str, float] = {}
    for name, value in values_of(event).items():
        number = float(len(value)) if name == "contributors" else value
        if name in skipped or not isinstance(number, int | float) or math.isnan(number):
            continue
        found[f"{family}/{name}{of_norms if name.endswith('_norm') else ''}"] = float(number)
    return found


def values_of(event: Event | DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass instance by name.

    Raises:
        TypeError: ``event`` is not a dataclass instance.
    """
    if isinstance(event, type) or not hasattr(event, "__dataclass_fields__"):
        raise TypeError(f"an event is a dataclass instance, not {shown(event)}")
    return {field.name: getattr(event, field.name) for field in fields(event)}


def _snake(name: str) -> str:
    """Convert a class name to snake case: ``OuterStep`` to ``outer_step``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
