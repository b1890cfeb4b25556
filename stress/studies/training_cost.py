"""What ``DiLoCo`` costs the training thread: steps per second beside peers that are silent.

Two peers behind an emulated link, one thread of torch each, modes in turn: ``silent`` makes the
inner steps alone, ``idle`` wraps and never synchronizes, the others are those of the wrapper.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

import pccl
from pccl.cli.bench.crew import Crew, ProcessDied
from pccl.cli.bench.run import relays
from pccl.cli.streams import writing

MODULE = "pccl.stress.studies.training_peer"
PEERS = 2
MODES = ("silent", "idle", "sync", "delayed", "streaming")


@click.command("training")
@click.option("--link", required=True, help="As for relay.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES)
@click.option("--repeat", type=click.IntRange(1, 100), default=1, show_default=True)
@click.option("--width", type=click.IntRange(8, 8192), default=700, show_default=True)
@click.option("--batch", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--steps", type=click.IntRange(1, 10**6), default=1000, show_default=True)
@click.option("--sync-every", type=click.IntRange(1, 10**6), default=100, show_default=True)
@click.option("--fragments", type=click.IntRange(1, 4), default=4, show_default=True)
@click.option("--compression", default="none", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one object per line.")
def training(link: str, modes: tuple[str, ...], repeat: int, as_json: bool, **load: Any) -> None:
    """Show what DiLoCo costs two peers on an emulated link, beside peers that are silent."""
    with writing():
        for _ in range(repeat):
            for mode in modes:
                for cost in _costs(link, mode, load):
                    click.echo(json.dumps(cost) if as_json else _plain(cost))


def _costs(link: str, mode: str, load: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = [f"peer {peer}" for peer in range(PEERS)]
    with (
        pccl.MasterNode("127.0.0.1:0") as node,
        Crew() as crew,
        relays(crew, link, node.address, PEERS) as (master, doors),
    ):
        for name, (listen, advertise) in zip(names, doors, strict=True):
            told = {
                "master": master,
                "listen": listen,
                "advertise": advertise,
                "mode": mode,
                "peers": PEERS,
                "load": load,
            }
            crew.start(name, MODULE, [json.dumps(told)])
        try:
            while crew.running(names):
                for _, line in crew.hear():
                    yield json.loads(line)
        except ProcessDied as death:
            said = "\n".join(death.said)
            raise click.ClickException(f"{death}\n{said}") from death


def _plain(cost: dict[str, Any]) -> str:
    return (
        f"{cost['mode']:9}  {cost['steps_per_s']:8.2f} steps/s, "
        f"median step {cost['median_step_ms']:7.2f} ms, "
        f"{cost['outer_steps']:3} outer steps, exposed {cost['exposed_s']:6.2f} s, "
        f"hidden {cost['hidden_s']:6.2f} s, sent {cost['tx_bytes'] / 1e6:.2f} MB; of a step "
        f"{cost['compute_ms']:.1f} ms computed, {cost['queue_ms']:.1f} queued, "
        f"{cost['lock_ms']:.1f} locked, {cost['others_ms']:.1f} of other threads"
    )
