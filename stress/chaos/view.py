"""Shows a run while it lasts: a live table on a terminal, otherwise lines."""

from __future__ import annotations

import collections
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pccl.stress.chaos.verdict.record import Life, RunRecord

NOTES_MAX = 14
LINE_EVERY_S = 10.0
RATE_WINDOW_S = 2.0
REDRAW_S = 0.25

QUIET_S = 1.0
"""The table shows a peer without progress for longer than this as waiting."""

BAD = ("WRONG", "DAMAGED", "HANG", "CRASH", "ERROR")


class _Rate:
    """The number of operations per second, in the last few seconds."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def update(self, now_s: float, count: int) -> float:
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - RATE_WINDOW_S:
            self._seen.popleft()
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class ChaosView:
    """A table of the processes, with the last events under it; lines if stdout is no terminal."""

    def __init__(self) -> None:
        self._console = console = Console()
        live = Live(console=console, auto_refresh=False, transient=True)
        self._live = live if console.is_terminal else None
        self._notes: collections.deque[Text] = collections.deque(maxlen=NOTES_MAX)
        self._shown_s = 0.0
        self._rate = _Rate()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def note(self, at_s: float, text: str) -> None:
        """Show an event ``at_s`` seconds after the beginning; errors stay visible."""
        line = f"{at_s:7.1f} s  {text}"
        if self._live is None:
            print(line, flush=True)
            return
        bad = text.startswith(BAD)
        self._notes.append(Text(line, style="bold red" if bad else ""))
        if bad:
            self._console.print(self._notes[-1])

    def update(self, record: RunRecord, now_s: float) -> None:
        """Show the state of the run, unless the last update was a moment ago."""
        waits = self._live is None and not record.began_s
        if waits or now_s - self._shown_s < (LINE_EVERY_S if self._live is None else REDRAW_S):
            return
        self._shown_s = now_s
        at_s = now_s - record.began_s if record.began_s else 0.0
        rate = self._rate.update(now_s, len(record.operations))
        words = f"{summary(record)}, {rate:.1f} per second"
        if self._live is None:
            self.note(at_s, words)
            return
        title = f"{at_s:.0f} of {record.timeline.duration_s:.0f} s: {words}"
        table = Table(title=title, title_justify="left")
        for name in ("process", "pid", "state", "memory", "threads", "descriptors"):
            table.add_column(name)
        for index in sorted({life.index for life in record.lives}):
            life = record.newest(index)
            if life is not None and (life.exit_code is None or index < 0):
                table.add_row(*_cells(record, life, now_s))
        self._live.update(Group(table, *self._notes), refresh=True)


def _cells(record: RunRecord, life: Life, now_s: float) -> tuple[str, ...]:
    troubles = [
        str(done.fault.kind)
        for done in record.done
        if done.began_s <= now_s < done.ended_s and done.fault.concerns(life.index)
    ]
    quiet_s = now_s - life.progress_s
    state = "gone" if life.exit_code is not None or life.killed else "ok"
    if state == "ok" and life.index >= 0 and quiet_s > QUIET_S:
        state = f"waits for {quiet_s:.0f} s"
    last = life.samples[-1] if life.samples else None
    held = ("", "", "")
    if last is not None:
        mib = f"{last.resident_bytes >> 20} MiB"
        held = (mib, str(last.threads), str(last.descriptors))
    return (life.label, str(life.pid), ", ".join([state, *troubles]), *held)


def summary(record: RunRecord) -> str:
    """Return the state of the run as text."""
    worlds = "+".join(str(size) for _, size in sorted(record.world_sizes.items()))
    wrong = record.wrong_values.count + record.damaged_inputs.count + record.hangs.count
    return (
        f"world size {worlds or 0}, {len(record.operations)} operations, "
        f"{len(record.done)} faults, {wrong} wrong"
    )
