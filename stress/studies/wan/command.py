"""The command ``wan``: compares plans of all-reduces over an emulated network."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pccl.checks import LANES_MAX
from pccl.cli.bench.plan import ALGORITHMS, FORMATS, ROUNDS_MAX
from pccl.cli.bench.statistics import OURS, Figures
from pccl.cli.processes.crew import Crew, end_on_signals
from pccl.cli.sizes import ListOf, Size, format_size
from pccl.cli.streams import writing
from pccl.stress.emulator.sites.matrix import SITES_MAX, SITES_MIN, SiteMatrix
from pccl.stress.emulator.sites.tunnels import MTU_BYTES
from pccl.stress.studies.wan.bounds import WanBounds, WanRates, bounds_of
from pccl.stress.studies.wan.peer import GLOO, WanTask
from pccl.stress.studies.wan.run import WanResults, WanRun

FLOAT_BYTES = 4


@click.command(context_settings={"show_default": True})
@click.argument("matrix")
@click.option("--scale", type=click.FloatRange(1), default=50.0, help="Divide all rates by this.")
@click.option("--first", type=click.IntRange(SITES_MIN, SITES_MAX), help="Only so many sites.")
@click.option("--machines", type=click.IntRange(1, SITES_MAX), default=1, help="As for sites.")
@click.option("--size", type=Size(), default="16MiB", help="Size of the tensor of float32.")
@click.option(
    "--algorithm",
    "algorithms",
    type=ListOf(click.Choice(ALGORITHMS)),
    default="ring,mesh,auto",
    help="Algorithms, in turn.",
)
@click.option(
    "--quantize",
    "formats",
    type=ListOf(click.Choice(list(FORMATS))),
    default="none,int8",
    help="Wire formats, each with each algorithm.",
)
@click.option("--rounds", type=click.IntRange(1, ROUNDS_MAX), default=3, help="Of each phase.")
@click.option("--warmup", type=click.IntRange(0, ROUNDS_MAX), default=1, help="Rounds before.")
@click.option(
    "--optimize",
    type=click.IntRange(0, ROUNDS_MAX),
    default=0,
    help="More phases; each calls optimize_topology and then measures auto.",
)
@click.option("--lanes", type=click.IntRange(0, LANES_MAX), default=0, help="0: automatic.")
@click.option("--gloo", is_flag=True, help="Also measure Gloo at the same sites.")
@click.option("--measures", is_flag=True, help="Compare what the master knows with MATRIX.")
@click.option("--mtu", type=click.IntRange(576, 65_535), default=MTU_BYTES, help="As for sites.")
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def wan(
    *, matrix: str, scale: float, first: int | None, machines: int, as_json: bool, **given: Any
) -> None:
    """Compare plans of all-reduces at the sites of MATRIX (aws10, gcp12, home8, or a file).

    Each site has a peer, a process in its own namespace; the master has none of the limits. The
    time of a round is from the first call to the last return of all peers. All values are checked.
    The bounds count bytes only, and of a limit per connection they take one connection for each
    pair, or as many as --lanes. Needs root on Linux.
    """
    try:
        chosen = SiteMatrix.load(matrix).chosen(scale, first, machines)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    task = WanTask(
        namespace="",
        master="",
        peers=len(chosen.sites),
        size=given["size"],
        lanes=given["lanes"],
        algorithms=given["algorithms"],
        formats=given["formats"],
        rounds=given["rounds"],
        warmup=given["warmup"],
        optimize=given["optimize"],
        store=GLOO if given["gloo"] else "",
        measures=given["measures"],
    )
    bounds = bounds_of(WanRates.of(chosen, max(1, task.lanes)))
    sites = [matrix, "--scale", str(scale), "--mtu", str(given["mtu"])]
    sites += ["--machines", str(machines)]
    sites += [] if first is None else ["--first", str(first)]
    end_on_signals()
    with Crew() as crew:
        results = WanRun(crew, chosen, task, _say).play(sites)
    with writing():
        if as_json:
            parts = {"bounds_s_per_byte": asdict(bounds), **asdict(results)}
            about = {"matrix": chosen.name, "scale": scale, "sites": chosen.sites}
            click.echo(json.dumps({**about, **parts}))
        else:
            _show(results, bounds, f"{chosen.name} / {scale:g}, {format_size(task.size)}")
    faults = [fault for each in results.figures for fault in each["faults"]]
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _show(results: WanResults, bounds: WanBounds, title: str) -> None:
    console = Console()
    table = Table("phase", "plan", "format", "median", "from", "to", "path", "bound", "ratio")
    for each in results.figures:
        bound_s = _bound_of(bounds, each)
        table.add_row(
            each["after"],
            each["algorithm_asked"] if each["side"] == OURS else each["side"],
            each["quantize"],
            f"{each['span_median']:.2f} s",
            f"{each['span_min']:.2f}",
            f"{max(each['span']):.2f}",
            each["algorithm"],
            "" if bound_s is None else f"{bound_s:.2f} s",
            "" if bound_s is None else f"{each['span_median'] / bound_s:.2f}",
        )
    console.print(title, highlight=False)
    console.print(table)
    for text in _words_of(results, bounds, results.figures[0]["bytes"]):
        console.print(text, highlight=False, soft_wrap=True)


def _words_of(results: WanResults, bounds: WanBounds, size: int) -> list[str]:
    """Return the lines below the table."""
    named = {
        "ring in order": bounds.ring,
        "best ring": bounds.best_ring,
        "mesh": bounds.mesh,
        "weighted mesh": bounds.weighted,
        "two levels": bounds.two_levels,
    }
    times = [f"{name} {per_byte * size:.2f} s" for name, per_byte in named.items() if per_byte]
    lines = [f"bounds of float32: {', '.join(times)}", f"best shares: {_list(bounds.shares)}"]
    lines += [
        f"{each.after}: the router used {each.router:.0%} of a processor; all were {each.busy:.0%} "
        "busy"
        for each in results.loads
    ]
    lines += [
        f"{each.after}: shares of the mesh {_list(each.shares) or 'equal'}; bound "
        f"{each.s_per_byte * size:.2f} s"
        for each in results.plans
    ]
    lines.append(f"the router {results.router}")
    lines += [
        f"{each.after}: {each.what} of {each.known} of {each.links} links is known; measured / "
        f"true {each.median:.2f} ({each.p10:.2f} to {each.p90:.2f})"
        for each in results.measures
    ]
    return lines


def _list(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)


def _bound_of(bounds: WanBounds, figures: Figures) -> float | None:
    """Return the seconds that the plan needs for the bytes of its format; None: no such bound."""
    per_byte = {
        "ring": bounds.ring,
        "mesh": bounds.mesh,
        "auto": bounds.two_levels or bounds.weighted,
        "": bounds.ring,
    }.get(figures["algorithm_asked"])
    if per_byte is None:
        return None
    wire_bytes: float = figures["bytes"] / FLOAT_BYTES * figures["wire_bytes_per_value"]
    return per_byte * wire_bytes
