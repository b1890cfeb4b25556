"""Writes the report on a run: a JSON file, a page with plots, and a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pccl.stress.chaos.trouble import words
from pccl.stress.chaos.verdict.judge import Judgement, waits
from pccl.stress.chaos.verdict.plots import dots, over_time, rates, world_sizes
from pccl.stress.chaos.verdict.record import RunRecord

COUNTS = (
    "operations",
    "wrong_values",
    "damaged_inputs",
    "hangs",
    "leaks",
    "false_removals",
    "crashes",
    "errors",
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem;
  color: #1f2937; background: #fff }
h1 span { padding: 0 .4em; border-radius: .2em; color: #fff; background: #dc2626 }
h1 span.ok { background: #059669 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb }
td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto }
pre { white-space: pre-wrap; background: #f3f4f6; padding: .6rem }
"""


def write_json(judgement: Judgement, path: Path) -> None:
    """Write the report as a JSON object.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(judgement.report, indent=2) + "\n")


def write_html(judgement: Judgement, record: RunRecord, path: Path) -> None:
    """Write the report as one self-contained HTML page.

    Raises:
        OSError: the file cannot be written.
    """
    report = judgement.report
    seconds = max(1.0, record.ended_s - record.began_s)
    marks = [max(0.0, done.began_s - record.began_s) for done in record.done]
    faults = [f"{at:9.2f} s  {words(d.fault)}" for at, d in zip(marks, record.done, strict=True)]
    verdict = escape(str(report["verdict"]))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>pccl stress: {verdict}</title><style>{STYLE}</style>",
        f'<h1>pccl stress run <span class="{verdict}">{verdict}</span></h1>',
        f"<p>{escape(headline(report))}</p>",
        table("what", ["count"], {name: {"count": report[name]} for name in COUNTS}),
        "<h2>World size</h2><p>Contributors of each operation; red lines are faults.</p>",
        over_time(world_sizes(record, seconds), marks, seconds),
        f"<details><summary>Faults</summary><pre>{escape(chr(10).join(faults))}</pre></details>",
        "<h2>Operations per second</h2>",
        over_time([rates(record, seconds)], marks, seconds),
        "<h2>Recovery</h2><p>Seconds from a fault to the next operation of the other peers that "
        "committed.</p>",
        dots(waits(record)),
        table("fault", ["count", "median", "p95", "max"], report["recovery_s"]),
    ]
    for name, texts in report["findings"].items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += [f"<pre>{escape(text)}</pre>" for text in texts]
    parts.append(f"<h2>Settings</h2><pre>{escape(json.dumps(report['settings'], indent=1))}</pre>")
    path.write_text("\n".join(parts) + "</html>\n")


def show(judgement: Judgement, console: Console) -> None:
    """Print a summary of the report."""
    report = judgement.report
    if report["recovery_s"]:
        table = Table("fault", "count", "recovery median", "p95", "max")
        for kind, each in report["recovery_s"].items():
            cells = (f"{each[name]:.2f} s" for name in ("median", "p95", "max"))
            table.add_row(kind, str(each["count"]), *cells)
        console.print(table)
    for name, texts in report["findings"].items():
        for text in texts[:5]:
            line = f"{name}: {text}"
            console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in COUNTS[1:])
    console.print(f"{headline(report)}: {counts}", highlight=False, soft_wrap=True)
    style = "bold green" if judgement.is_ok else "bold red"
    console.print(f"verdict: {report['verdict']}", style=style, highlight=False)


def headline(report: Mapping[str, Any]) -> str:
    """Return peers, seed, duration, faults and operations of a run in one line."""
    faults = sum(report["faults"].values())
    return (
        f"{report['peers']} peers, seed {report['seed']}, {report['seconds']:.0f} s, "
        f"{faults} faults, {report['operations']} operations"
    )


def table(first: str, columns: list[str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table as HTML. ``rows``: first cell -> values by column; values are HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in [first, *columns])
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{row.get(column, '')}</td>" for column in columns)
        + "</tr>"
        for name, row in rows.items()
    )
    return f"<table><tr>{head}</tr>{body}</table>"
