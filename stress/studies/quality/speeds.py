"""The command ``quality speeds``: what a slow peer costs the others if ``sync_every`` is a time.

``pccl launch`` starts the peers. Each pretends to compute for the time of its step, so that two
cores can be four machines. The last peer is slower than the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import click

_PROGRAM = "from pccl.stress.studies.quality.speeds import train; train()"
_WIDTH = 128


@click.command()
@click.option("--peers", type=click.IntRange(2), default=4, show_default=True)
@click.option("--slowest", type=click.IntRange(1), default=4, show_default=True,
              help="Steps that the others make while the last peer makes one.")  # fmt: skip
@click.option("--step-s", type=click.FloatRange(0.001), default=0.04, show_default=True,
              help="Seconds that a step of the others takes.")  # fmt: skip
@click.option("--sync-every", default="4s", show_default=True, help="As for DiLoCo.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
def speeds(peers: int, slowest: int, step_s: float, sync_every: str, rounds: int) -> None:
    """Train with unequally fast peers, and print the share of their summed speed that is used."""
    paces = [step_s] * (peers - 1) + [step_s * slowest]
    told = json.dumps({"paces": paces, "sync_every": sync_every, "rounds": rounds})
    command = [sys.executable, "-m", "pccl.cli.main", "launch", "-n", str(peers), "--"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", _PROGRAM],
        env={"PCCL_LOG": "warning", **os.environ, "PCCL_STRESS_SPEEDS": told},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise click.ClickException(f"pccl launch ended with {ended.returncode}")
    made = possible = 0.0
    index: int
    steps: int
    seconds: float
    for line in ended.stdout.splitlines():
        index, steps, seconds = json.loads(line[line.index("[", 1) :])
        made, possible = made + steps, possible + seconds / paces[index]
        click.echo(f"peer {index}: {steps} steps in {seconds:.1f} s")
    click.echo(f"{made:.0f} of {possible:.0f} steps, {100 * made / possible:.1f} %")


def train() -> None:
    """Train as one peer; print its number, its inner steps, and the seconds that they took."""
    import torch

    import pccl
    from pccl.bindings.diloco import DiLoCo

    told = json.loads(os.environ["PCCL_STRESS_SPEEDS"])
    index = int(os.environ["PCCL_PEER_INDEX"])
    torch.set_num_threads(1)
    model = torch.nn.Linear(_WIDTH, _WIDTH)
    inner = torch.optim.AdamW(model.parameters())
    peers, sync_every = len(told["paces"]), told["sync_every"]
    with (
        pccl.Communicator() as comm,
        DiLoCo(model, inner=inner, comm=comm, sync_every=sync_every, min_peers=peers) as opt,
    ):
        opt.join()
        began_s = time.monotonic()
        while opt.round < told["rounds"]:
            ends_s = time.monotonic() + told["paces"][index]
            torch.autograd.backward(model(torch.randn(8, _WIDTH)).square().mean())
            time.sleep(max(0.0, ends_s - time.monotonic()))
            opt.step()
            opt.zero_grad()
        print(json.dumps([index, opt.inner_steps, time.monotonic() - began_s]))
        opt.finish()
