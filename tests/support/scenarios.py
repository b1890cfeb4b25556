"""Text scenarios: the events that a machine receives, step by step, and their recorded effects.

A file is a list of scenarios. A line that begins with ``== `` names the next one, in words. A step
is a line that begins with ``> ``: a Python expression over the words of the machine's stage. The
indented lines below it are the effects. A line that begins with ``# `` explains.

``pytest tests/scenario --record`` writes the outputs anew. Read each line that it changes: a
recording shows what the code does, and only its reader can say whether that is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from pccl.protocol.errors import PCCLError, RemoteProtocolError
from pccl.protocol.handshake.certificates import Certificate
from pccl.protocol.limits import TERM_GAP
from pccl.protocol.operation import Subset
from pccl.protocol.types import (
    KEY_BYTES,
    Member,
    OperationId,
    PeerId,
    Roster,
    RoundKind,
)

INDENT = "    "


class Stage(Protocol):
    """A machine that plays a scenario."""

    words: dict[str, Any]
    """What steps may say."""

    def tell(self, said: Any, listener: str) -> Iterable[str]:
        """Tell the machine; return what came of it. ``listener``: what stood before a colon."""
        ...

    def status(self) -> dict[str, str]:
        """What an observer of the machine sees: a line shows each part that has changed."""
        ...


# -- values in few letters -----------------------------------------------------------------------

ROUNDS = {
    "UPDATE": RoundKind.UPDATE_TOPOLOGY,
    "PENDING": RoundKind.PEERS_PENDING,
    "OPTIMIZE": RoundKind.OPTIMIZE_TOPOLOGY,
}


def key(peer: int) -> bytes:
    """The public key of the peer of that number."""
    return peer.to_bytes(KEY_BYTES)


def where(peer: int, owner: int | None = None) -> Member:
    """The member of that number, at its usual address; with another key than its own: ``owner``."""
    proven = key(peer if owner is None else owner)
    return Member(PeerId(peer), f"10.0.0.{peer}", 4000 + peer, key=proven)


def op(n: int = 0, *, tag: int = 5, view: int = 1, term: int = 1, group: int = 0) -> OperationId:
    """An operation, usually of the run that everybody has begun."""
    return OperationId(term, group, view, tag, n)


def subset(*peers: int, tag: int = 5) -> Subset:
    """Some members in this order, and their usual tag."""
    return Subset(tuple(map(PeerId, peers)), tag)


def tag_of(*peers: int, tag: int = 5) -> int:
    """The tag of their operations."""
    return subset(*peers, tag=tag).operation_tag


def roster(version: int, view: int, *peers: int, **others: Any) -> Roster:
    """A run of one group, with the members at their usual addresses."""
    size = len(peers)
    usual: dict[str, Any] = {
        "group": 0,
        "members": tuple(where(peer) for peer in peers),
        "open_views": (view,),
        "global_world_size": size,
        "peer_groups": 1,
        "largest_group_size": size,
    }
    return Roster(version=version, view=view, **{**usual, **others})


def public(module: ModuleType) -> dict[str, Any]:
    """The classes of ours in a module."""
    return {
        name: one
        for name, one in vars(module).items()
        if inspect.isclass(one) and one.__module__.startswith("pccl.")
    }


WORDS: dict[str, Any] = {
    "GAP": TERM_GAP,
    "key": key,
    "where": where,
    "op": op,
    "subset": subset,
    "tag_of": tag_of,
    "roster": roster,
    **ROUNDS,
}


class Short:
    """Writes values as the expressions that make them, in few letters, without certificates.

    Args:
        names: of values that have one.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        known: dict[Any, str] = {**{kind: name for name, kind in ROUNDS.items()}, **names}
        self._names: dict[tuple[type[Any], Any], str] = {
            (type(value), value): name for value, name in known.items()
        }

    def of(self, value: Any) -> str:
        """An expression over the words."""
        try:
            name = self._names.get((value.__class__, value))
        except TypeError:  # it holds what has no hash
            name = None
        if name is not None:
            return name
        match value:
            case Enum():
                return f"{type(value).__name__}.{value.name}"
            case tuple() | list():
                items = [self.of(item) for item in cast("Sequence[Any]", value)]
                return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            case PCCLError():
                return f"{type(value).__name__}({int(value.result)}, {value.reason!r})"
            case Member(peer) if value == where(peer):
                return f"where({self.of(peer)})"
            case OperationId(term, group, view, tag, n):
                given = {"tag": tag, "view": view, "term": term, "group": group}
                return self._call("op", [str(n)] if n else [], given, op)
            case Roster():
                return self._roster(value)
            case int() if (
                TERM_GAP <= value < 2 * TERM_GAP
            ):  # a number that another master has given out
                return f"GAP + {value - TERM_GAP}"
            case dict():
                return self._dict(value)  # pyright: ignore[reportUnknownArgumentType]
            case _ if is_dataclass(value):
                return self._dataclass(value)
            case _:
                return repr(value)

    def _call(
        self, name: str, first: list[str], given: Mapping[str, Any], maker: Callable[..., Any]
    ) -> str:
        usual = maker.__kwdefaults__ or {}
        more = [f"{key}={self.of(v)}" for key, v in given.items() if v != usual.get(key, MISSING)]
        return f"{name}({', '.join(first + more)})"

    def _dict(self, value: dict[Any, Any]) -> str:
        pairs = [f"{self.of(key)}: {self.of(held)}" for key, held in value.items()]
        return f"{{{', '.join(pairs)}}}"

    def _roster(self, value: Roster) -> str:
        peers = [int(member.peer) for member in value.members]
        usual = roster(value.version, value.view, *peers)
        more = [
            f"{item.name}={self.of(getattr(value, item.name))}"
            for item in fields(value)
            if getattr(value, item.name) != getattr(usual, item.name)
        ]
        return f"roster({', '.join([*map(self.of, (value.version, value.view, *peers)), *more])})"

    def _dataclass(self, value: Any) -> str:
        written, all_so_far = list[str](), True
        for item in fields(value):
            held = getattr(value, item.name)
            usual = item.default
            if usual is MISSING and item.default_factory is not MISSING:
                usual = item.default_factory()
            if isinstance(held, Certificate) or (usual is not MISSING and held == usual):
                all_so_far = False
            else:
                text = self.of(held)
                written.append(text if all_so_far else f"{item.name}={text}")
        return f"{type(value).__name__}({', '.join(written)})"


# -- files ---------------------------------------------------------------------------------------


@dataclass
class Step:
    """One event of a scenario.

    Attributes:
        text: what stands behind ``> ``.
        output: its effects, as recorded.
        above: empty lines and comments before it.
    """

    text: str
    output: list[str] = field(default_factory=list[str])
    above: list[str] = field(default_factory=list[str])


@dataclass
class Scenario:
    """One story of a file."""

    title: str
    above: list[str]
    steps: list[Step] = field(default_factory=list[Step])

    def as_text(self) -> str:
        """As it stands in its file."""
        lines = [*self.above, f"== {self.title}"]
        for step in self.steps:
            lines += [*step.above, f"> {step.text}", *step.output]
        return "\n".join(lines)


def read(path: Path) -> list[Scenario]:
    """The scenarios of a file.

    Raises:
        ValueError: a line is none of those that there are.
    """
    scenarios, above = list[Scenario](), list[str]()
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if line.startswith("== "):
            scenarios.append(Scenario(line[3:], above))
            above = []
        elif line.startswith("> ") and scenarios:
            scenarios[-1].steps.append(Step(line[2:], above=above))
            above = []
        elif not line or line.startswith("#"):
            above.append(line)
        elif line.startswith(INDENT) and scenarios and scenarios[-1].steps and not above:
            scenarios[-1].steps[-1].output.append(line)
        else:
            raise ValueError(f"{path.name}:{number}: neither a title, nor a step, nor an output")
    return scenarios


def write(path: Path, scenarios: Iterable[Scenario]) -> None:
    """Write a file as ``read`` reads it."""
    path.write_text("\n".join(one.as_text() for one in scenarios) + "\n", "utf-8")


def play(scenario: Scenario, stage: Stage) -> list[Step]:
    """Play a scenario; return its steps with what comes of them now."""
    steps = list[Step]()
    for step in scenario.steps:
        before = stage.status()
        output = list(_outputs(step.text, stage))
        after = stage.status()
        if steps:  # the first one sets the stage
            changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
            output += [f"= {key}: {after.get(key, 'none')}" for key in sorted(changed)]
        steps.append(Step(step.text, [INDENT + line for line in output], step.above))
    return steps


def _outputs(text: str, stage: Stage) -> Iterator[str]:
    listener, colon, said = text.partition(": ")
    if not (colon and listener.isalnum()):
        listener, said = "", text
    try:
        yield from stage.tell(eval(said, {**stage.words}), listener)
    except RemoteProtocolError as error:
        yield f"! RemoteProtocolError: {error.reason}"
