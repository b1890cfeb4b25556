"""Judges a run: finds what is wrong, and makes the report.

The judge sees only the record, and none of the code that it judges.
"""

from __future__ import annotations

import bisect
import re
import signal
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pccl.stress.chaos.settings import blame_s
from pccl.stress.chaos.verdict.record import Findings, Life, RemovalSeen, RunRecord
from pccl.stress.timeline import MASTER, OF_MASTER, OF_PAIR, FaultKind

_APART = re.compile(r"LINK_BROKEN: peers (\d+), (\d+) ")
"""The reason of a removal that names two members without a link, by their ids."""

GROWTH_BYTES_MAX = 32 << 20
"""Maximum growth of the resident memory of a process: the allocator keeps some memory of freed
tensors of a few MiB."""

WARM_S = 60.0
"""The judge compares memory from this time on: by then every kind of iteration has run."""

WINDOW_S = 30.0
"""Length of the first and the last window, whose medians the judge compares."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a judgement.

    Attributes:
        is_ok: whether the judge found nothing wrong, and the run was not interrupted.
        report: the report as a JSON object.
    """

    is_ok: bool
    report: dict[str, Any]


def judge(record: RunRecord, *, interrupted: bool = False) -> Judgement:
    """Judge a run that has ended, and make its report."""
    leaks, crashes, false_removals = Findings(), Findings(), Findings()
    for life in record.lives:
        _find_leaks(life, leaks)
        _find_crash(life, crashes)
        if life.hung:
            record.hangs.texts.append("\n".join([f"{life.label} hangs at", *life.said]))
    for removal in record.removals:
        if not _is_explained(record, removal):
            at_s = removal.at_s - record.began_s
            false_removals.add(f"{at_s:.1f} s: peer {removal.index}: {removal.text}")
    errors = Findings(record.errors.count, [*record.errors.texts])
    for lost in record.lost_masters:
        if not _may_lose_master(record, lost.at_s):
            errors.add(f"{lost.at_s - record.began_s:.1f} s: peer {lost.index}: {lost.text}")
    found = {
        "wrong_values": record.wrong_values,
        "damaged_inputs": record.damaged_inputs,
        "hangs": record.hangs,
        "leaks": leaks,
        "false_removals": false_removals,
        "crashes": crashes,
        "errors": errors,
    }
    is_ok = not any(each.count for each in found.values()) and bool(record.operations)
    verdict = "ok" if is_ok else "failed"
    timeline = record.timeline
    report: dict[str, Any] = {
        "verdict": "interrupted" if interrupted and is_ok else verdict,
        "seed": timeline.seed,
        "peers": timeline.peers,
        "seconds": round(record.ended_s - record.began_s, 3) if record.began_s else 0.0,
        "operations": len(record.operations),
        "results": record.results,
        "retries": record.retries,
        **{name: each.count for name, each in found.items()},
        "faults": dict(sorted(Counter(str(d.fault.kind) for d in record.done).items())),
        "skipped_faults": dict(sorted(record.skipped.items())),
        "recovery_s": recovery_s(record),
        "join_s": _summary(_join_times(record.lives)),
        "failures": dict(sorted(record.failures.items())),
        "removals": len(record.removals),
        "processes": len(record.lives),
        "memory_growth_bytes_max": max((_growth(life) for life in record.lives), default=0),
        "findings": {name: each.texts for name, each in found.items() if each.texts},
        "settings": {
            "link": timeline.link,
            "lanes": timeline.lanes,
            "groups": timeline.groups,
            "deadline_s": timeline.deadline_s,
            "duration_s": timeline.duration_s,
        },
    }
    return Judgement(is_ok and not interrupted, report)


# -- recovery ------------------------------------------------------------------------------------


def waits(record: RunRecord) -> dict[str, list[float]]:
    """Return how long other peers waited for a result after each fault: kind -> seconds.

    A wait lasts from a fault to the first operation that committed after it. If a fault concerns
    several groups, the last group counts.
    """
    times: dict[int, list[float]] = {}
    for (group, *_), operation in record.operations.items():
        times.setdefault(group, []).append(operation.at_s)
    for each in times.values():
        each.sort()
    found: dict[str, list[float]] = {}
    for done in record.done:
        groups = _groups_of(record, done.fault.peer, done.fault.kind)
        waited = [_wait(times.get(group, []), done.began_s) for group in groups]
        known = [wait for wait in waited if wait is not None]
        if known and len(known) == len(waited):
            found.setdefault(str(done.fault.kind), []).append(max(known))
    return found


def recovery_s(record: RunRecord) -> dict[str, dict[str, float]]:
    """Return median, 95th percentile and maximum of ``waits``."""
    return {kind: _summary(each) for kind, each in sorted(waits(record).items())}


def _groups_of(record: RunRecord, peer: int, kind: FaultKind) -> Iterable[int]:
    if peer == MASTER or kind in OF_MASTER:
        return sorted({group for group, *_ in record.operations})
    return [record.group_of(peer)]


def _wait(times: Sequence[float], began_s: float) -> float | None:
    where = bisect.bisect_right(times, began_s)
    return times[where] - began_s if where < len(times) else None


def _join_times(lives: Iterable[Life]) -> list[float]:
    return [
        life.first_result_s - life.began_s
        for life in lives
        if life.first_result_s is not None and life.index >= 0
    ]


def _summary(times: Sequence[float]) -> dict[str, float]:
    if not times:
        return {}
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 6),
        "p95": round(p95, 6),
        "max": round(ordered[-1], 6),
    }


# -- what is wrong -------------------------------------------------------------------------------


def _is_explained(record: RunRecord, removal: RemovalSeen) -> bool:
    """Whether a fault or a kill of the process, shortly before, explains ``removal``."""
    slack_s = blame_s(record.timeline)
    for life in record.lives:
        if life.index == removal.index and (life.killed or life.told_to_leave):
            ended_s = life.ended_s if life.ended_s is not None else removal.at_s
            if ended_s - 1.0 <= removal.at_s <= ended_s + slack_s:
                return True
    for done in record.done:
        if not done.began_s <= removal.at_s <= done.ended_s + slack_s:
            continue
        fault = done.fault
        if fault.kind in (FaultKind.GARBAGE, FaultKind.JOINERS, *OF_MASTER):
            continue  # such faults explain no removal
        if fault.concerns(removal.index):
            return True
        # Of two members without a link, the master may remove either, also the far one.
        pair = _APART.search(removal.text)
        ends = {record.indices.get(int(number)) for number in pair.groups()} if pair else ()
        if fault.kind in OF_PAIR and fault.other is None and fault.peer in ends:
            return True
    return False


def _may_lose_master(record: RunRecord, at_s: float) -> bool:
    """Whether a master without stored state may have begun another run at that time.

    It cannot know the old run until a member of that run returns; then it continues the old run.
    """
    slack_s = blame_s(record.timeline)
    return any(
        done.fault.kind is FaultKind.MASTER_RESTART_BLANK
        and done.began_s <= at_s <= done.ended_s + slack_s
        for done in record.done
    )


def _find_crash(life: Life, crashes: Findings) -> None:
    if life.killed or life.hung or life.exit_code == 0:
        return
    how = "has not ended"
    if life.exit_code is not None:
        how = f"ended with exit code {life.exit_code}"
        if life.exit_code < 0:
            how = f"ended by {signal.Signals(-life.exit_code).name}"
    said = "\n".join([*life.said][-30:])
    crashes.add(f"{life.label} (pid {life.pid}) {how}:\n{said}".strip())


def _find_leaks(life: Life, leaks: Findings) -> None:
    if life.samples and life.samples[-1].ends:
        first, last = life.samples[0], life.samples[-1]
        for what, began, ended in (
            ("descriptors", first.descriptors, last.descriptors),
            ("threads", first.threads, last.threads),
        ):
            if ended > began:
                leaks.add(f"{life.label} (pid {life.pid}): {ended} {what} at its end, not {began}")
    elif life.exit_code == 0:
        leaks.add(f"{life.label} (pid {life.pid}) ended without a last sample of its resources")
    growth_bytes = _growth(life)
    if growth_bytes > GROWTH_BYTES_MAX:
        leaks.add(f"{life.label} (pid {life.pid}): memory grew by {growth_bytes >> 20} MiB")


def _growth(life: Life) -> int:
    """Return the growth from the median of the first window to that of the last, in bytes."""
    samples = [each for each in life.samples if not each.ends]
    if not samples:
        return 0
    begin_s, end_s = samples[0].at + WARM_S, samples[-1].at
    if end_s - begin_s < 2 * WINDOW_S:
        return 0
    early = [s.resident_bytes for s in samples if begin_s <= s.at <= begin_s + WINDOW_S]
    late = [s.resident_bytes for s in samples if s.at >= end_s - WINDOW_S]
    if not early or not late:
        return 0
    return round(statistics.median(late) - statistics.median(early))
