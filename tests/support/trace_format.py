"""Chrome's trace event format: what a viewer needs of a file, checked entry by entry."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]

NAMES = {
    "process_name": "name",
    "process_labels": "labels",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_trace(trace: Mapping[str, Any]) -> None:
    """Check the structure of a trace.

    Every entry has the fields of its kind. All threads and processes have names. Entries are in the
    order of their times, and an outer slice comes before the slices inside it. Slices of a thread
    lie apart or inside each other. Each arrow has one start and one end, which is not earlier, and
    both lie in slices.
    """
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    entries: Sequence[Entry] = trace["traceEvents"]
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    threads: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        where = entry["pid"], entry["tid"]
        assert all(type(number) is int for number in where)
        if entry["ph"] == "M":
            assert entry["args"].keys() == {NAMES[entry["name"]]}
            assert (entry["pid"], 0) not in threads or entry["tid"] == 0
            named[entry["name"]].add(where)
        else:
            assert entry["ph"] in "Xisf"
            assert isinstance(entry["name"], str)
            assert type(entry["ts"]) is int
            threads[where].append(entry)
    assert len(named["process_name"]) == sum(e.get("name") == "process_name" for e in entries)
    for where, here in threads.items():
        assert where in named["thread_name"]
        assert (where[0], 0) in named["process_name"]
        _check_thread(here)
    times = [entry["ts"] for entry in entries if entry["ph"] != "M"]
    assert times == sorted(times)
    _check_arrows(threads)


def _check_thread(entries: Sequence[Entry]) -> None:
    ends: list[int] = []
    for entry in entries:
        if entry["ph"] == "i":
            assert entry["s"] in "gpt"
        if entry["ph"] != "X":
            continue
        began = entry["ts"]
        assert type(entry["dur"]) is int
        assert entry["dur"] > 0
        while ends and ends[-1] <= began:
            ends.pop()
        ends.append(began + entry["dur"])
        assert ends == sorted(ends, reverse=True), "slices overlap, but none is inside the other"


def _check_arrows(threads: Mapping[tuple[int, int], Sequence[Entry]]) -> None:
    ends: dict[str, dict[int, Entry]] = {"s": {}, "f": {}}
    for entries in threads.values():
        bars = [entry for entry in entries if entry["ph"] == "X"]
        for entry in entries:
            if entry["ph"] in ends:
                assert entry["id"] not in ends[entry["ph"]]
                ends[entry["ph"]][entry["id"]] = entry
                assert any(bar["ts"] <= entry["ts"] <= bar["ts"] + bar["dur"] for bar in bars)
    assert ends["s"].keys() == ends["f"].keys()
    for number, start in ends["s"].items():
        end = ends["f"][number]
        assert start["ts"] <= end["ts"]
        assert (end["bp"], end["cat"], end["name"]) == ("e", start["cat"], start["name"])
