"""Writes the lists of messages, limits, events and metrics in ``docs/protocol`` from the code."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from pccl.cli.streams import writing
from pccl.observe.metrics import METRICS
from pccl.protocol import codec, frame, limits, messages
from pccl.protocol import types as vocabulary
from pccl.protocol.status_report import StatusReport
from pccl.runtime.control import stream
from pccl.runtime.state import frames, results
from pccl.telemetry import events
from pccl.transports import tcp_listener

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "protocol"
MESSAGES = """# Messages

*Written by `python -m pccl.stress reference` from `pccl/protocol/messages.py`.*

These messages travel on [control connections](connections.md), with their code and an array of
their fields. A field without a type is a u64. `[X]` is a list, `X?` is X or nil. Other types are
[values](#values), or enums, which travel as numbers."""
LIMITS = """# Limits

*Written by `python -m pccl.stress reference` from `pccl/protocol/limits.py`, among others.*

Each line names what is limited, and what happens beyond the limit. By default, the connection
or lane is closed."""
TIMING = """## Timing

`MasterNode` and `Communicator` take a `pccl.Timing(...)`. Each time is above 0 and at most ten
years. Nothing checks that processes agree."""
TELEMETRY = f"""# Events and metrics

*Written by `python -m pccl.stress reference` from `pccl/telemetry/events.py` and
`pccl/observe/metrics.py`.* [Observing a run](../observing.md) says how to get them.

## Events

In files, an event is an object with its fields, its kind as `event`, and the version of this list
as `schema`: now `"{".".join(map(str, events.SCHEMA))}"`. A later minor version may add kinds and
fields; a reader ignores those that it does not know. Fields without a text mean the same
as above."""
METRIC_TABLE = """## Metrics

Each has the label `name` too: the peer's name, or `master`."""
OTHER_LIMITS = (
    *((vocabulary, name) for name in ("STAR_BYTES_MAX", "ALGORITHM_STEPS_MAX")),
    *((frame, "PAYLOAD_BYTES_MAX"), (stream, "UNSENT_BYTES_MAX")),
    (tcp_listener, "ACCEPT_BACKOFF_S"),
    *((frames, "QUEUED_PIECES_MAX"), (results, "KEPT_BYTES_MAX"), (results, "UNREAD_BYTES_MAX")),
)
"""Limits outside ``limits.py``, beside the code that enforces them."""


@click.command("reference")
def reference() -> None:
    """Write the pages of docs/protocol that list messages, limits, events and metrics."""
    with writing():
        for name, text in pages().items():
            (FOLDER / name).write_text(text, "utf-8")
            click.echo(f"{name}: {len(text.split())} words")


def pages() -> Mapping[str, str]:
    """Return the text of each page, by the name of its file."""
    made = {"messages.md": _messages(), "limits.md": _limits(), "telemetry.md": _telemetry()}
    return {name: "\n\n".join(parts) + "\n" for name, parts in made.items()}


def _table(*rows: tuple[str, ...]) -> str:
    lines = [" | ".join(row).replace("|  |", "| |").rstrip() for row in rows]
    return "\n".join([lines[0], "|".join(["---"] * len(rows[0])), *lines[1:]])


def _plain(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as one line of Markdown."""
    text = " ".join((docstring or "").partition("\n\n")[0].split())
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def _docstrings(source: str) -> Mapping[str, str]:
    """Return the names of a class or module that have docstrings, with these docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else tree.body
    found: dict[str, str] = {}
    for node, below in pairwise(body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found[ast.unparse(target)] = _plain(ast.literal_eval(below.value))
    return found


def _messages() -> Iterator[str]:
    values: list[type[Any]] = []
    yield MESSAGES
    common = next(part for part in str(messages.__doc__).split("\n\n") if "mean the same" in part)
    yield textwrap.fill(_plain(common), 110)
    for sender, union in (("peer", messages.PeerMessage), ("master", messages.MasterMessage)):
        kinds = sorted(typing.get_args(union), key=codec.CODES.__getitem__)
        rows = (
            (f"{codec.CODES[k]} `{k.__name__}`", _plain(k.__doc__), _fields(k, values, _notes(k)))
            for k in kinds
        )
        yield f"## From a {sender}\n\n{_table(('message', 'meaning', 'fields'), *rows)}"
    others = (kind for kind in values if kind not in codec.CODES)  # grows while rows are made
    pairs = ((f"`{kind.__name__}`", _fields(kind, values, {})) for kind in others)
    yield f"## Values\n\n{_table(('value', 'fields'), *pairs)}"


def _fields(kind: type[Any], values: list[type[Any]], notes: Mapping[str, str]) -> str:
    """Return the fields of a dataclass, types and notes; add nested dataclasses to ``values``."""
    if kind is StatusReport:
        return "`pccl/protocol/status_report.py`"
    hints = typing.get_type_hints(kind, include_extras=True)
    named = (
        f"`{field.name}:{_wire_type(hints[field.name], values)}`{notes.get(field.name, '')}"
        for field in fields(kind)
    )
    return ", ".join(named).replace(":u64`", "`")


def _wire_type(hint: Any, values: list[type[Any]]) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, typing.NewType):
        return _wire_type(hint.__supertype__, values)
    if origin is typing.Annotated and isinstance(arguments[1], vocabulary.Below):
        return {1 << 16: "u16", 1 << 32: "u32"}.get(arguments[1].bound, "u64")
    if origin is not None:
        inner = _wire_type(arguments[0], values)
        is_optional = origin in (types.UnionType, typing.Union)
        return f"[{inner}]" if origin is tuple else f"{inner}?" if is_optional else inner
    kind = typing.cast("type[Any]", hint)
    if is_dataclass(kind) and kind not in values:
        values.append(kind)
    return "u64" if kind is int else kind.__name__


def _notes(kind: type[Any]) -> Mapping[str, str]:
    """Return the docstrings of a message's fields, in parentheses."""
    told = _docstrings(inspect.getsource(kind)).items()
    return {name: f" ({text[0].lower()}{text[1:].removesuffix('.')})" for name, text in told}


def _telemetry() -> Iterator[str]:
    kinds = typing.get_args(events.PeerReport)
    known = set[str]()
    rows = (
        (f"`{kind.__name__}`", _plain(kind.__doc__), _attributes(kind, known)) for kind in kinds
    )
    yield f"{TELEMETRY}\n\n{_table(('event', 'meaning', 'fields'), *rows)}"
    values = (
        (f"`{name}`", about.kind, ", ".join(f"`{label}`" for label in about.labels), about.help)
        for name, about in METRICS.items()
    )
    yield f"{METRIC_TABLE}\n\n{_table(('metric', 'kind', 'labels', 'meaning'), *values)}"


def _attributes(kind: type[Any], known: set[str]) -> str:
    """Return the fields of an event, and their meanings that are not ``known`` yet; note these."""
    part = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", part, re.MULTILINE)
    told = [f"`{name}`: {_plain(text)}" for name, text in found]
    shown = [field.partition(":")[0] + "." if field in known else field for field in told]
    known.update(told)
    return " ".join(shown)


def _limits() -> Iterator[str]:
    yield LIMITS
    parts = re.split(r"^# -- (.*?) -+$", inspect.getsource(limits), flags=re.MULTILINE)[1:]
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        yield _chapter(title.capitalize(), *((limits, name) for name in _docstrings(part)))
    yield _chapter("In other modules", *OTHER_LIMITS)
    told, default = _docstrings(inspect.getsource(limits.Timing)), limits.Timing()
    rows = ((f"`{name}`", f"{getattr(default, name):g} s", text) for name, text in told.items())
    yield f"{TIMING}\n\n{_table(('field', 'default', 'time'), *rows)}"


def _chapter(title: str, *names: tuple[types.ModuleType, str]) -> str:
    told = [(module, name, _docstrings(inspect.getsource(module))[name]) for module, name in names]
    rows = ((f"`{name}`", _value(name, getattr(module, name)), text) for module, name, text in told)
    return f"## {title}\n\n{_table(('limit', 'value', 'what'), *rows)}"


def _value(name: str, value: float) -> str:
    """Return a value in a readable unit."""
    if "_NS" in name or re.search("(?<!_PER)_S$", name):
        return f"{value / (1e9 if '_NS' in name else 1):g} s"
    unit = "bytes" * ("BYTES" in name)
    for size, longer in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if unit == "bytes" and value % size == 0 and value % 10**6:
            value, unit = value / size, longer
    number = f"{value:,.0f}".replace(",", " ") if value >= 10_000 else f"{value:g}"
    return f"{number} {unit}".rstrip() + "/s" * ("_PER_S" in name)
