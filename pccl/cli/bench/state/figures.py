"""From what the processes of ``pccl bench state`` report to figures. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pccl.cli.bench.state.words import Case, JoinMeasured, Played
from pccl.cli.bench.statistics import DIGITS, GIB, MIB

HASHING_WANTED = 0.8
UPLINKS_WANTED = 2.5


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Attributes:
        part: of ``PARTS``.
        case: which one.
        bytes: of the state.
        seconds: of every round, of whoever was the last.
        values: other figures by name, units last.
        faults: the first wrong value of each process that had one.
    """

    part: str
    case: str
    bytes: int
    seconds: tuple[float, ...]
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    faults: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "state": self.part,
            "case": self.case,
            "bytes": self.bytes,
            "seconds_median": round(self.median, DIGITS),
            "seconds_min": min(self.seconds),
            "seconds_max": max(self.seconds),
            **self.values,
            "values_ok": not self.faults,
            "faults": self.faults,
            "seconds": self.seconds,
        }

    def to_line(self) -> str:
        """For people."""
        low, high = min(self.seconds), max(self.seconds)
        found = f"{self.part:<10}{self.case:<26}{_seconds(self.median):>9}"
        found += f"  ({_seconds(low)} to {_seconds(high)})" if high > low else ""
        rest = ", ".join(f"{name} {_number(value)}" for name, value in self.values.items())
        return f"{found:<62} {rest}".rstrip()


def hashing_figures(nbytes: int, found: dict[str, Any]) -> list[Figure]:
    """Of the ways to hash, beside that of the hash's own threads.

    Args:
        nbytes: of the state.
        found: what ``pccl.stress.studies.hashing`` says.
    """
    reference = statistics.median(found["all_processors"]["seconds"])
    figures: list[Figure] = []
    for name, what in found.items():
        seconds = tuple(round(each, DIGITS) for each in what["seconds"])
        median = statistics.median(seconds)
        values = {
            "gib_per_s": nbytes / GIB / median,
            "cpu_s_per_gib": statistics.fmean(what["cpu_s"]) * GIB / nbytes,
        }
        if name == "pieces":
            values |= {"of_all_processors": reference / median, "wanted": HASHING_WANTED}
        figures.append(Figure("hashing", name, nbytes, seconds, values))
    return figures


def part_of(case: Case) -> str:
    """Of ``PARTS``, on loopback."""
    if case.kind in ("unchanged", "touched"):
        return "unchanged"
    return "sync" if case.kind in ("sync", "copy", "copy_hash") else "memory"


def name_of(case: Case) -> str:
    """In words."""
    if case.kind != "sync":
        return _NAMES[case.kind]
    sources = f"{case.sources} source{'s' * (case.sources > 1)}"
    return sources + (f", {case.joiners} joiners" if case.joiners > 1 else "")


_NAMES = {
    "copy": "plain copy",
    "copy_hash": "plain copy, hashed",
    "unchanged": "everything hashed",
    "touched": "nothing touched",
    "staged": "staged in memory",
    "spooled": "staged on disk",
    "in_place": "in place",
}


def played_figure(
    case: Case, part: str, nbytes: int, sources: Sequence[Played], joiners: Sequence[Played]
) -> Figure:
    """Of one case.

    Args:
        case: which one.
        part: of ``PARTS``.
        nbytes: of the state.
        sources: what each said that had the contents.
        joiners: what each said that had not.
    """
    seconds = tuple(map(max, zip(*(each.seconds for each in joiners), strict=True)))
    median = statistics.median(seconds)
    values: dict[str, Any] = {}
    if part == "memory":
        values |= {
            "joiner_extra_mib": max(each.extra_bytes for each in joiners) / MIB,
            "joiner_extra_anonymous_mib": max(each.anonymous_bytes for each in joiners) / MIB,
            "source_extra_mib": max(each.extra_bytes for each in sources) / MIB,
        }
    if part != "unchanged":
        delivered = nbytes * len(joiners) / GIB
        values |= {
            "gib_per_s": delivered / median,
            "source_cpu_s_per_gib": _cpu_s(sources) / delivered,
            "joiner_cpu_s_per_gib": _cpu_s(joiners) / delivered,
        }
    phases = [each for each in joiners if each.hashing_s]
    if phases:
        values |= {
            name: statistics.median(time for each in phases for time in getattr(each, name))
            for name in ("hashing_s", "fetching_s", "placing_s")
        }
    if case.sources > 1 or case.joiners > 1:
        values["tx_mib"] = [round(each.tx_bytes / MIB, 1) for each in (*sources, *joiners)]
    if sources[0].congestion and part == "sync":
        values["congestion"] = ",".join(sources[0].congestion)
    faults = tuple(filter(None, (each.fault for each in (*sources, *joiners))))
    return Figure(part, name_of(case), nbytes, seconds, values, faults)


def with_ratios(figures: Sequence[Figure]) -> list[Figure]:
    """The same, with ratios to the plain copy, and to one source behind emulated uplinks."""
    known = {(figure.part, figure.case): figure.median for figure in figures}
    found: list[Figure] = []
    for figure in figures:
        values = dict(figure.values)
        if figure.part == "sync" and not figure.case.startswith("plain"):
            for name, case in (("of_copy", "plain copy"), ("of_hashed_copy", "plain copy, hashed")):
                values[name] = known["sync", case] / figure.median
        if figure.part == "uplinks" and figure.case.endswith("joiners"):
            values["times_one_joiner"] = figure.median / known["uplinks", "1 source"]
        elif figure.part == "uplinks" and figure.case != "1 source":
            values["times_one_source"] = known["uplinks", "1 source"] / figure.median
            if figure.case == "3 sources":
                values["wanted"] = UPLINKS_WANTED
        found.append(
            Figure(figure.part, figure.case, figure.bytes, figure.seconds, values, figure.faults)
        )
    return found


def join_figure(
    nbytes: int, joins: Sequence[Sequence[JoinMeasured]], *, prefetches: bool
) -> Figure:
    """Of joins of one kind; the seconds are those that all members of a join were kept longer.

    Args:
        nbytes: of the state.
        joins: for each what the processes said.
        prefetches: whether the joiner fetched in the background.
    """
    extra: list[float] = []
    longest: list[float] = []
    usual: list[float] = []
    steps: list[int] = []
    joiners: list[JoinMeasured] = []
    for said in joins:
        members = [each for each in said if each.before_s]
        joiners += [each for each in said if not each.before_s]
        step = statistics.median(time for each in members for time in each.before_s)
        usual.append(step)
        extra.append(max(sum(each.during_s) - step * len(each.during_s) for each in members))
        longest.append(max(max(each.during_s) for each in members))
        steps.append(max(len(each.during_s) for each in members))
    values = {
        "longest_s": statistics.median(longest),
        "longest_s_max": max(longest),
        "usual_s": statistics.median(usual),
        "steps": statistics.median(steps),
        "connect_s": statistics.median(each.connect_s for each in joiners),
        "first_sync_s": statistics.median(each.sync_s for each in joiners),
        "first_sync_mib": statistics.median(each.rx_bytes for each in joiners) / MIB,
    }
    faults = tuple(filter(None, (each.fault for said in joins for each in said)))
    case = "fetched in the background" if prefetches else "fetched when admitted"
    seconds = tuple(round(each, DIGITS) for each in extra)
    return Figure("join", case, nbytes, seconds, values, faults)


def _cpu_s(processes: Sequence[Played]) -> float:
    """Mean over the rounds of what all of them together have used."""
    return statistics.fmean(map(sum, zip(*(each.cpu_s for each in processes), strict=True)))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
