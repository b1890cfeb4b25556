"""The output of the demo: a progress bar for each process, lines of text, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pccl.cli.demo.record import ACCURACY_MIN, DemoRecord, Worker
from pccl.progress import size

STYLES = {"fetching": "cyan", "training": "green", "finished": "bold green", "killed": "bold red"}


def board(workers: list[Worker], *, quiet: bool) -> Progress:
    """Return a progress bar for each worker, shown below the printed lines on a terminal only."""
    console = Console()
    words = ("{task.description}", "{task.fields[state]}", "{task.fields[how]}")
    name, state, how = (TextColumn(word) for word in words)
    found = Progress(name, state, BarColumn(16), how, console=console, refresh_per_second=5)
    found.disable = quiet or not console.is_terminal
    for worker in workers:
        found.add_task(worker.label, total=worker.task.steps, state="", how="")
    return found


def show(rows: Progress, workers: list[Worker]) -> None:
    """Update the progress bars."""
    for number, worker in enumerate(workers):
        told = worker.told
        how = f"step {told.step}  loss {told.loss:.4f}" if told.step else told.fetch
        if told.contributors:
            rate = told.rate if told.status == "training" else 0.0
            how += f"  world size {len(told.contributors)}  {size(rate)}/s"
        state = f"[{STYLES.get(told.status, 'dim')}]{told.status:8}[/]"
        row, who = TaskID(number), worker.label
        rows.update(row, description=who, completed=told.step, state=state, how=how)


def summary(record: DemoRecord, found: dict[str, Any], picture: Path) -> dict[str, str]:
    """Return the results of the demo for the user, as names and values."""
    ended = sorted(record.peers, key=lambda peer: peer.told.peer_id)
    digests = {each.label: each.told.digest[:32] for each in ended if each.told.digest}
    sent = sum(peer.told.tx_bytes for peer in record.peers)
    resumed_s, fetched_bytes = record.resumed_s, found["fetched_bytes"]
    return {
        "held-out accuracy": f"{found['accuracy'] or 0:.1%} (at least {ACCURACY_MIN:.1%})",
        "one shard alone": f"{found['single_shard_accuracy'] or 0:.1%} (same number of steps)",
        **{f"weights of {who}": f"sha256 {digest}" for who, digest in digests.items()},
        "weights equal": "yes, bit for bit" if found["digests_equal"] else "NO",
        "peers": f"{found['joined_peers']} joined, {found['lost_peers']} lost",
        "traffic": f"{size(sent)} sent between the peers",
        **({"fetched by the newcomer": size(fetched_bytes)} if fetched_bytes else {}),
        **({"continued after": f"{resumed_s:.2f} s"} if resumed_s is not None else {}),
        "picture": str(picture),
        "time": f"{found['seconds']:.1f} s",
    }


def draw(record: DemoRecord, path: Path) -> None:
    """Draw loss and world size over time, with kill and join marked, from at least one point."""
    # Imported here: takes half a second, and only the end of a demo needs it. Typed in part only.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    loss_axes = figure.add_subplot()
    size_axes = loss_axes.twinx()
    times, _, losses, sizes = zip(*record.points, strict=True)
    lines = loss_axes.semilogy(times, losses, color="tab:blue", label="training loss")
    lines += size_axes.step(times, sizes, where="post", color="tab:orange", label="world size")
    marks = {"SIGKILL": (record.killed, "tab:red"), "one joins": (record.grown, "tab:green")}
    for name, (mark, color) in marks.items():
        if mark is not None:
            label = f"{name}, step {mark.step}"
            lines.append(loss_axes.axvline(mark.at_s, color=color, linestyle="--", label=label))
    loss_axes.set(xlabel="seconds since the start", ylabel="training loss, mean over the peers")
    size_axes.set(ylabel="world size", ylim=(0, len(record.peers) + 1))
    size_axes.set_yticks(range(len(record.peers) + 2))
    loss_axes.legend(handles=lines, loc="lower left")
    loss_axes.set_title("pccl demo: the peers train one network together")
    figure.savefig(path, dpi=120, format="png")
