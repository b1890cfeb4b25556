"""The command line of ``train_gpt.py``."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pccl
from gpt.model import Shape

MODES = ("alone", "data-parallel", "sync", "delayed", "eager", "streaming")
INNERS = ("adamw", "muon")
FORMATS = tuple(wire.label for wire in pccl.WireFormat)
"""Values of ``--compression``."""

FRAGMENTS, MIXING = 4, 0.5
"""Defaults of the mode ``streaming``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a training; ``--help`` describes each one."""

    mode: str
    steps: int
    sync_every: int | str
    delay: int
    fragments: int
    mixing: float
    outer: tuple[float, float] | None
    compression: str | None
    min_peers: int
    shape: Shape
    batch: int
    inner: str
    lr: float
    warm_up: int
    seed: int
    peer: int
    text: Path | None
    evaluate_every: int
    held_out: int
    checkpoint: Path | None
    checkpoint_every: int
    log: Path | None
    tensorboard: Path | None
    status: bool
    sample: int
    threads: int | None

    @property
    def tokens_per_step(self) -> int:
        """The number of bytes that one peer trains on in one step."""
        return self.batch * self.shape.context


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line, and the variables of ``pccl launch`` in the environment.

    Raises:
        SystemExit: the options are wrong, or the user asked for help; the text has been printed.
    """
    parser = make_parser()
    given = parser.parse_args(arguments)
    peers, index = int(os.environ.get("PCCL_PEERS", "1")), os.environ.get("PCCL_PEER_INDEX")
    try:
        return complete(given, peers, index, in_run="PCCL_MASTER" in os.environ)
    except ValueError as error:
        parser.error(str(error))


def complete(given: argparse.Namespace, peers: int, index: str | None, *, in_run: bool) -> Options:
    """Return the options, with defaults that depend on other options.

    Args:
        given: the command line as parsed by :func:`make_parser`.
        peers: number of processes that ``pccl launch`` started here.
        index: number of this process among them; None: not started by ``pccl launch``.
        in_run: whether this process joins a run. In a run without ``index``, it chooses a random
            number, so that no other peer draws the same data.

    Raises:
        ValueError: options do not fit together.
    """
    shape = Shape(given.width, given.layers, given.heads, given.context)
    known = dict(vars(given), shape=shape)
    if given.tokens is not None:
        known["steps"] = max(1, given.tokens // (given.batch * given.context))
    known["fragments"] = given.fragments or (FRAGMENTS if given.mode == "streaming" else 1)
    if given.mixing is None:
        known["mixing"] = MIXING if given.mode == "streaming" else 0.0
    if given.delay is None:
        known["delay"] = usual_delay(given.mode, given.sync_every, known["fragments"])
    known["peer"] = int(index or 0) if index or not in_run else secrets.randbits(32)
    known["sample"] = given.sample if index in (None, "0") else 0  # all peers would write the same
    known["min_peers"] = given.min_peers or peers
    known["threads"] = given.threads or (1 if peers > 1 else None)
    for name in ("checkpoint", "log", "tensorboard"):
        path: str | None = known[name]
        if path is not None:
            known[name] = own_path(path, f"--{name}", peers, index)
    return Options(**{field.name: known[field.name] for field in fields(Options)})


def usual_delay(mode: str, sync_every: int | str, fragments: int) -> int:
    """Return the default of ``--delay``: inner steps until an average is merged.

    In these modes, that is when the next average begins: in ``streaming``, of the next fragment.

    Raises:
        ValueError: ``sync_every`` is a time, so the number of steps is unknown.
    """
    if mode not in ("delayed", "eager", "streaming"):
        return 0
    if not isinstance(sync_every, int):
        raise ValueError(f"--sync-every {sync_every} with --mode {mode} needs --delay STEPS")
    return max(1, sync_every // fragments)


def own_path(path: str, option: str, peers: int, index: str | None) -> Path:
    """Return ``path`` with the number of this process in place of ``{peer}``.

    Raises:
        ValueError: several processes of this machine would write to one path.
    """
    if peers > 1 and "{peer}" not in path:
        raise ValueError(f"{option} {path} is one path for {peers} peers: put {{peer}} into it")
    return Path(path.replace("{peer}", index or "0"))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all options. A default that depends on other options is None here."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small GPT on the bytes of real text, alone or with other peers.",
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="sync", help="how the peers train together (%(default)s)")

    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=positive, default=600, help="inner steps (%(default)s)", metavar="N"
    )
    length.add_argument(
        "--tokens", type=positive, metavar="N", help="bytes for each peer, instead of --steps"
    )

    add(
        "--sync-every",
        type=steps_or_time,
        default=50,
        metavar="N",
        help="inner steps between two averages (%(default)s), or a time such as 30s; with a time, "
        "each peer ends after --steps of its own",
    )
    add(
        "--delay",
        type=count,
        metavar="N",
        help="inner steps until an average is merged "
        "(delayed, eager: --sync-every, streaming: --sync-every / --fragments, else 0)",
    )
    add("--fragments", type=positive, metavar="N", help=f"parts (streaming: {FRAGMENTS}, else 1)")
    add("--mixing", type=float, metavar="A", help=f"local share (streaming: {MIXING}, else 0)")
    add(
        "--outer",
        type=float,
        nargs=2,
        metavar=("LR", "MOMENTUM"),
        help="rate and Nesterov momentum of the outer optimizer (the default of DiLoCo)",
    )
    add("--compression", choices=FORMATS, metavar="FORMAT", help=f"{', '.join(FORMATS)}")
    add("--min-peers", type=positive, metavar="N", help="begin with so many (all in the launch)")

    add = parser.add_argument_group("model").add_argument
    add("--width", type=positive, default=128, metavar="N", help="(%(default)s)")
    add("--layers", type=positive, default=4, metavar="N", help="(%(default)s)")
    add("--heads", type=positive, default=4, metavar="N", help="(%(default)s)")
    add("--context", type=positive, default=128, metavar="N", help="bytes (%(default)s)")

    add = parser.add_argument_group("learning").add_argument
    add("--batch", type=positive, default=8, metavar="N", help="excerpts per step (%(default)s)")
    add("--inner", choices=INNERS, default="adamw", help="optimizer of every step (%(default)s)")
    add("--lr", type=float, default=2e-3, metavar="R", help="peak learning rate (%(default)s)")
    add("--warm-up", type=count, default=60, metavar="N", help="steps (%(default)s)")
    add("--seed", type=count, default=0, metavar="N", help="(%(default)s)")
    add("--text", type=Path, metavar="DIR", help="training text (Python's standard library)")

    add = parser.add_argument_group("output; {peer} in a path: its number").add_argument
    add("--evaluate-every", type=positive, default=50, metavar="N", help="steps (%(default)s)")
    add("--held-out", type=positive, default=64, metavar="N", help="excerpts (%(default)s)")
    add("--checkpoint", metavar="PATH", help="file to save to, and to resume from if it exists")
    add("--checkpoint-every", type=positive, default=100, metavar="N", help="steps (%(default)s)")
    add("--log", metavar="FILE", help="events and losses as lines of JSON")
    add("--tensorboard", metavar="DIR", help="events and losses as curves")
    add("--status", action="store_true", help="show one line with the progress on stderr")
    add("--sample", type=count, default=0, metavar="N", help="bytes to write at the end")
    add("--threads", type=positive, metavar="N", help="torch threads (1 if launch made several)")
    return parser


def positive(text: str) -> int:
    """Parse an int of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def count(text: str) -> int:
    """Parse an int of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def steps_or_time(text: str) -> int | str:
    """Parse a number of steps; leave a time such as ``30s`` to DiLoCo."""
    return positive(text) if text.lstrip("-").isdigit() else text
