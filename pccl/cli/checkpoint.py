"""``pccl checkpoint`` verifies a checkpoint, and shows its contents."""

from __future__ import annotations

import json
from typing import Any

import click

from pccl import checkpoint as files
from pccl.cli.streams import writing


@click.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def checkpoint(file: str, as_json: bool) -> None:
    """Verify every byte of FILE, which SharedState.save has written, and show its contents.

    Shows the revision, the run, the digest of the contents and each tensor. Members with the same
    contents have the same digest. Any reader of safetensors can load FILE, too.

    The exit code is 1 if FILE is not a checkpoint, is truncated or altered, or cannot be read.
    """
    try:
        found = files.verify(file)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise click.ClickException(f"cannot read {file}: {reason}") from error
    with writing():
        if as_json:
            click.echo(json.dumps(to_json(file, found)))
        else:
            click.echo("\n".join(lines_of(file, found)))


def to_json(file: str, found: files.Checkpoint) -> dict[str, Any]:
    """Return the checkpoint as the object that ``--json`` prints."""
    lineage = found.lineage
    return {
        "file": file,
        "revision": found.revision,
        "run": None if lineage is None else lineage.run.hex(),
        "operation": None if lineage is None else str(lineage.operation),
        "bytes": found.nbytes,
        "digest": found.digest.hex(),
        "tensors": [
            {
                "name": one.name,
                "dtype": one.dtype.label,
                "shape": list(one.shape),
                "bytes": one.nbytes,
                "allow_content_inequality": one.allow_content_inequality,
                "digest": one.digest.hex(),
            }
            for one in found.tensors
        ],
    }


def lines_of(file: str, found: files.Checkpoint) -> list[str]:
    """Return the checkpoint as lines for people."""
    count = f"{len(found.tensors)} tensor{'s' * (len(found.tensors) != 1)}"
    lineage = found.lineage
    origin = "never synchronized"
    if lineage is not None:
        origin = f"of run {lineage.run.hex()}, synchronized in {lineage.operation}"
    return [
        f"{file} is complete: revision {found.revision}, {count}, {found.nbytes} bytes",
        f"  {origin}",
        f"  contents {found.digest.hex()}",
        *(f"  {one.digest.hex()[:16]} {_described(one)}" for one in found.tensors),
    ]


def _described(one: files.CheckpointTensor) -> str:
    shape = "x".join(map(str, one.shape)) or "scalar"
    differs = ", members may differ" if one.allow_content_inequality else ""
    return f"{one.name!r}: {shape} {one.dtype.label}, {one.nbytes} bytes{differs}"
