"""What the peers of these tests have in common: a tiny model, its data, a gate, a report."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from tests.support.peers import report

SYNC_EVERY = 5
BATCH = 4
ACCUMULATED = 2
"""Batches for each step."""


@dataclass(frozen=True)
class Given:
    """What the test says to a peer.

    Attributes:
        master: address of the master.
        peer: number of the peer, of its data.
        folder: where it keeps its checkpoints.
        steps: of the run, when training ends.
        peers: members that a round needs.
        gate: batches after which it waits for a line of the test; 0: it never does.
        save: step after which it saves a checkpoint; 0: it saves none.
        resume: whether it continues from that checkpoint.
        compiles: whether it uses ``torch.compile``.
    """

    master: str
    peer: int
    folder: str
    steps: int
    peers: int = 2
    gate: int = 0
    save: int = 0
    resume: bool = False
    compiles: bool = False


def given() -> Given:
    """Read the argument of this process."""
    torch.set_num_threads(1)
    return Given(**json.loads(sys.argv[1]))


def make_model(peer: int) -> torch.nn.Module:
    """Make a GPT-2 of two layers; members elect the parameters of one."""
    library: Any = import_module("transformers")
    torch.default_generator.manual_seed(peer)
    sizes: dict[str, int] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16}
    tokens: dict[str, Any] = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = library.GPT2Config(**sizes, **tokens, **dropout)
    made: torch.nn.Module = library.GPT2LMHeadModel(config)
    return made


def accelerator(which: Given) -> Any:
    """Make the ``Accelerator`` of a peer."""
    return import_module("accelerate").Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=ACCUMULATED,
        dynamo_backend="eager" if which.compiles else None,
    )


def text(peer: int, number: int) -> torch.Tensor:
    """Return an example: some ascending tokens."""
    own = torch.Generator().manual_seed(100_000 * peer + number)
    return (torch.randint(0, 64, (1,), generator=own) + torch.arange(16)) % 64


class Texts(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The examples of a peer, without an end.

    If it resumes, those before the checkpoint are wrong: the library, or ``skips``, skips them.
    """

    def __init__(self, which: Given, *, skips: bool = False) -> None:
        self._given, self._skips = which, skips

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        done = self._given.save * ACCUMULATED * BATCH if self._given.resume else 0
        number = done if self._skips else 0
        while True:
            if number == self._given.gate * BATCH and number:
                report({"gate": True})
                sys.stdin.readline()
            example = text(self._given.peer, number) * (number >= done)
            yield {"input_ids": example, "labels": example}
            number += 1


def digest(model: torch.nn.Module) -> str:
    """Of all parameters."""
    values = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    return hashlib.sha256(values).hexdigest()


def ended(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """Report the end of training."""
    moments = min(float(state["step"]) for state in optimizer.state.values())
    report({"model": digest(model), "moments": moments, **more})
