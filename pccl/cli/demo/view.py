"""What the demo shows: a live table on a terminal, lines when piped, one object for programs.

No view decides anything; each is told the same things in the same
order.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Protocol, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pccl.cli.demo.record import ACCURACY_MIN, DemoRecord, DemoVerdict, Worker
from pccl.progress import describe

NOTE_COUNT_MAX = 16
"""Events that stay visible under the live table."""

PROGRESS_LINE_COUNT = 10
"""Lines of progress that a piped demo prints."""


DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest that are shown; all 64 are compared."""


STATUS_STYLES = {
    "fetching": "cyan",
    "training": "green",
    "finished": "bold green",
    "killed": "bold red",
}


class DemoView(Protocol):
    """Somebody to tell what happens. Entered before the first word, left before the conclusion."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Leave the terminal as it was found."""
        ...

    def note(self, now: float, text: str) -> None:
        """Something happened, ``now`` seconds after the beginning."""
        ...

    def complain(self, text: str) -> None:
        """A process wrote a line that it should not have had to write."""
        ...

    def update(self, record: DemoRecord, now: float) -> None:
        """Show how things stand; called several times a second."""
        ...

    def conclude(self, record: DemoRecord, verdict: DemoVerdict, picture: Path) -> None:
        """Say how it went."""
        ...


class DemoJsonView:
    """Nothing on stdout but one object at the end; what went wrong goes to stderr."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, now: float, text: str) -> None:
        """Not for programs."""

    def complain(self, text: str) -> None:
        """To stderr."""
        print(text, file=sys.stderr)

    def update(self, record: DemoRecord, now: float) -> None:
        """Not for programs."""

    def conclude(self, record: DemoRecord, verdict: DemoVerdict, picture: Path) -> None:
        """Print the object."""
        for failure in verdict.failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        print(verdict.to_json())


class DemoPlainView:
    """One line for each event and a few for the progress."""

    def __init__(self) -> None:
        self._step_next = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, now: float, text: str) -> None:
        """A line with the time before it."""
        print(f"{now:6.1f} s  {text}", flush=True)

    def complain(self, text: str) -> None:
        """To stderr."""
        print(text, file=sys.stderr, flush=True)

    def update(self, record: DemoRecord, now: float) -> None:
        """A line now and then."""
        if not record.points or record.step < self._step_next:
            return
        self._step_next = record.step + max(1, record.step_count // PROGRESS_LINE_COUNT)
        point = record.points[-1]
        rate = sum(peer.rate(now) for peer in record.peers)
        self.note(
            now,
            f"step {point.step}/{record.step_count}  loss {point.loss:.4f}  "
            f"world size {point.world_size}  {megabytes(rate)}/s",
        )

    def conclude(self, record: DemoRecord, verdict: DemoVerdict, picture: Path) -> None:
        """The same few lines as on a terminal."""
        for name, value in summary(record, verdict, picture):
            print(f"{name:24} {value}")
        print(outcome(verdict))


class DemoLiveView:
    """A table that is drawn over itself, and the events under it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._notes: collections.deque[str] = collections.deque(maxlen=NOTE_COUNT_MAX)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def note(self, now: float, text: str) -> None:
        """Shown under the table, from the next update on."""
        self._notes.append(f"{now:6.1f} s  {text}")

    def complain(self, text: str) -> None:
        """Above the table, where it stays."""
        self._console.print(Text(text, style="yellow"))

    def update(self, record: DemoRecord, now: float) -> None:
        """Draw the table anew."""
        notes = Text("\n".join(self._notes), style="cyan")
        self._live.update(Group(table(record, now), fetches(record), notes), refresh=True)

    def conclude(self, record: DemoRecord, verdict: DemoVerdict, picture: Path) -> None:
        """A few lines and a coloured last word."""
        grid = Table.grid(padding=(0, 2))
        for name, value in summary(record, verdict, picture):
            grid.add_row(Text(name, style="dim"), Text(value))
        self._console.print()
        self._console.print(grid)
        style = "bold red" if verdict.failures else "bold green"
        self._console.print(Text(outcome(verdict), style=style))


def choose_view() -> DemoPlainView | DemoLiveView:
    """The live table if somebody can watch it, lines otherwise."""
    console = Console()
    return DemoLiveView(console) if console.is_terminal else DemoPlainView()


def table(record: DemoRecord, now: float) -> Table:
    """How things stand, one row for each process; fits into 80 columns."""
    title = f"pccl demo: step {record.step} of {record.step_count}"
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("process", "shard", "state"):
        found.add_column(name, no_wrap=True)
    for name in ("step", "loss", "world size", "bandwidth"):
        found.add_column(name, justify="right", no_wrap=True)
    for worker in record.workers:
        style = "dim" if worker.alone or worker.killed else ""
        found.add_row(*cells(worker, now), style=style)
    return found


def fetches(record: DemoRecord) -> Table:
    """What those that came late fetch or have fetched, as bars; 80 columns wide."""
    grid = Table.grid(padding=(0, 1))
    for peer in record.peers:
        if peer.fetch is not None:
            done, total = peer.fetch.done_bytes, peer.fetch.total_bytes
            words = describe(peer.fetch)
            grid.add_row(Text(peer.label), ProgressBar(total, done, width=16), Text(words))
    return grid


def cells(worker: Worker, now: float) -> list[Text]:
    """One row of the table; what does not apply is left out at its end."""
    found = [
        Text(worker.label),
        Text(str(worker.shard)),
        Text(worker.status, style=STATUS_STYLES.get(worker.status, "")),
    ]
    if worker.latest is not None:
        found += [Text(str(worker.latest.step)), Text(f"{worker.latest.loss:.4f}")]
        if not worker.alone:
            rate = f"{megabytes(worker.rate(now))}/s"
            found += [Text(str(worker.world_size)), Text(rate)]
    return found


def megabytes(count: float) -> str:
    """A number of bytes, as people read it."""
    return f"{count / 1e6:.1f} MB"


def summary(record: DemoRecord, verdict: DemoVerdict, picture: Path) -> list[tuple[str, str]]:
    """Name and value of all that the demo has found out."""
    ended = sorted(record.survivors, key=lambda peer: peer.peer_id or 0)
    lines = [
        ("held-out accuracy", f"{percent(verdict.accuracy)} (at least {percent(ACCURACY_MIN)})"),
        ("one shard alone", f"{percent(verdict.single_shard_accuracy)} (after as many steps)"),
        *(
            (f"weights of {peer.label}", f"sha256 {peer.finished.digest[:DIGEST_LENGTH]}")
            for peer in ended
            if peer.finished is not None
        ),
        ("weights equal", "yes, bit for bit" if verdict.digests_equal else "NO"),
        ("peers", f"{verdict.joined_peers} joined, {verdict.lost_peers} lost"),
        ("moved", f"{megabytes(record.moved_bytes)} sent among the peers"),
        ("picture", str(picture)),
        ("time", f"{verdict.seconds:.1f} s"),
    ]
    if verdict.fetched_bytes:
        lines.insert(-3, ("fetched by the newcomer", megabytes(verdict.fetched_bytes)))
    if record.resumed_s is not None:
        lines.insert(-3, ("carried on after", f"{record.resumed_s:.2f} s"))
    return lines


def percent(share: float | None) -> str:
    """A share of one in per cent, or a dash if it is not known."""
    return "-" if share is None else f"{share:.1%}"


def outcome(verdict: DemoVerdict) -> str:
    """The last word."""
    if verdict.failures:
        return "\n".join(f"FAILED: {failure}" for failure in verdict.failures)
    return "OK: the run survived, and everybody left has the same weights"
