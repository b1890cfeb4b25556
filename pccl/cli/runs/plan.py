"""``pccl plan`` explains which algorithms a group uses, and what they cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pccl.cli.command_line import master_options, timeout_option
from pccl.cli.runs.target import find_target
from pccl.cli.sizes import ListOf, Size, format_size
from pccl.cli.status import ask
from pccl.cli.streams import writing
from pccl.observe import plan as plans
from pccl.observe.plan import PlannedGroup, Prediction
from pccl.observe.summary import US_PER_S, duration
from pccl.observe.summary import size as decimal

SIZES = "64KiB,1MiB,16MiB,256MiB"

MATRIX_MEMBERS_MAX = 16
"""Larger groups get no matrix: it would be wider than a terminal."""


@click.command()
@master_options
@click.option("--group", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option(
    "--sizes",
    type=ListOf(Size()),
    default=SIZES,
    show_default=True,
    help="Sizes of tensors, as all members send them: of a quantized one, its encoded size.",
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plan for the links in FILE, the output of pccl status --json; no run is asked.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@timeout_option()
def plan(
    master: str | None,
    token: str | None,
    group: int,
    sizes: tuple[int, ...],
    file: Path | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Show which algorithms a group uses, why, and how long they take.

    Shows the measured links, each member's share of a mesh, and for each size of tensor the time of
    every algorithm by the measured links. The last calls of the run of the same size show how long
    they took. The request does not change the run.

    A group keeps its plan until its members change, or until another plan is much faster when they
    call update_topology or optimize_topology.
    """
    if file is not None:
        known = _from_file(file, group)
    else:
        found = plans.of_status(ask(find_target(master, token), timeout_s), group)
        if found is None:
            raise click.ClickException(f"the master shows no plan of group {group}")
        known = found
    with writing():
        if as_json:
            click.echo(json.dumps(_as_json(known, sizes)))
        else:
            _show(known, sizes)


def _from_file(file: Path, group: int) -> PlannedGroup:
    try:
        return plans.of_json(json.loads(file.read_text("utf-8")), group)
    except (ValueError, RecursionError) as error:
        raise click.ClickException(f"{file} is no matrix of links: {error}") from error


def _show(known: PlannedGroup, sizes: tuple[int, ...]) -> None:
    width = None if Console().is_terminal else 200
    console = Console(width=width, markup=False, emoji=False)  # names are shown as they are
    if len(known.ring) <= MATRIX_MEMBERS_MAX:
        console.print(_matrix(known))
    console.print(_times(plans.predictions(known, known.plan, sizes)))
    if known.plan.mesh.shares:
        owned = plans.shares(known, known.plan).items()
        texts = (f"{_name(known, peer)} {share:.1%}" for peer, share in owned)
        console.print("shares in a mesh: " + ", ".join(texts))
    for members in plans.sites(known, known.plan):
        console.print("a site in a mesh: " + ", ".join(_name(known, peer) for peer in members))
    for line in _notes(known, sizes):
        console.print(line)


def _notes(known: PlannedGroup, sizes: tuple[int, ...]) -> Iterator[str]:
    if not known.is_complete:
        yield "the master has sent a part of the links only; times may be wrong"
    if unknown := _unmeasured(known):
        yield (
            f"{unknown} of {len(known.ring) * (len(known.ring) - 1)} directions have no measured "
            "speed: they count as 1 Gbit/s, inside one building as 10 Gbit/s"
        )
    new = plans.renewed(known)
    if new != known.plan:
        largest = max(sizes)
        (then,) = plans.predictions(known, new, [largest])
        time_s = then.times_s[then.chosen]
        yield (
            f"optimize_topology would change the plan: {format_size(largest)} by "
            f"{then.chosen.label} in {_time(time_s)}"
        )


def _matrix(known: PlannedGroup) -> Table:
    """Return the speeds of all links, and their round trips."""
    names = [_name(known, peer) for peer in known.ring]
    table = Table("from", *names, "all at once", box=SIMPLE_HEAD)
    for source in known.ring:
        row = [_name(known, source)]
        for target in known.ring:
            link = known.links.measured.get((source, target))
            speed = f"{decimal(link.bytes_per_s)}/s" if link and link.bytes_per_s else "?"
            rtt = f"{duration(link.rtt_ns / 1000)}" if link and link.rtt_ns else "?"
            row.append("" if source == target else f"{speed}\n{rtt}")
        uplink = known.links.uplinks.get(source)
        table.add_row(*row, f"{decimal(uplink)}/s" if uplink else "?")
    return table


def _times(predictions: Sequence[Prediction]) -> Table:
    """Return the times of all algorithms; the chosen one is marked."""
    table = Table("tensor", "ring", "star", "mesh", "mesh, equal", "measured", box=SIMPLE_HEAD)
    for one in predictions:
        times = {algorithm.label: _time(time_s) for algorithm, time_s in one.times_s.items()}
        times[one.chosen.label] = times.get(one.chosen.label, "?") + " *"
        equal = _time(one.equal_mesh_s) if one.equal_mesh_s is not None else "-"
        took = "-" if one.measured_s is None else f"{_time(one.measured_s)} ({one.measured_count})"
        columns = [times.get(label, "-") for label in ("ring", "star", "mesh")]
        table.add_row(format_size(one.tensor_bytes), *columns, equal, took)
    return table


def _as_json(known: PlannedGroup, sizes: tuple[int, ...]) -> dict[str, Any]:
    new = plans.renewed(known)
    return {
        "group": known.group,
        "members": [
            {
                "peer": peer,
                "name": known.names.get(peer, ""),
                "uplink_bytes_per_s": known.links.uplinks.get(peer, 0),
                "share": share,
            }
            for peer, share in plans.shares(known, known.plan).items()
        ],
        "links": [
            {
                "peer": source,
                "other": target,
                "rtt_us": link.rtt_ns // 1000,
                "bytes_per_s": link.bytes_per_s,
            }
            for (source, target), link in sorted(known.links.measured.items())
        ],
        "sites": plans.sites(known, known.plan),
        "is_complete": known.is_complete,
        "unmeasured": _unmeasured(known),
        "predictions": [
            {
                **dataclasses.asdict(one),
                "times_s": {algorithm.label: time_s for algorithm, time_s in one.times_s.items()},
                "chosen": one.chosen.label,
            }
            for one in plans.predictions(known, known.plan, sizes)
        ],
        "would_change": new != known.plan,
    }


def _unmeasured(known: PlannedGroup) -> int:
    pairs = [(a, b) for a in known.ring for b in known.ring if a != b]
    measured = known.links.measured
    return sum(1 for pair in pairs if pair not in measured or not measured[pair].bytes_per_s)


def _name(known: PlannedGroup, peer: int) -> str:
    name = {int(one): name for one, name in known.names.items()}.get(peer)
    return f"{peer} ({name})" if name else str(peer)


def _time(time_s: float) -> str:
    return duration(time_s * US_PER_S)
