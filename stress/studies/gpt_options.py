"""Options of the commands that run ``examples/train_gpt.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_LEAST = {"width": 4}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def gpt_options(**defaults: int) -> Decorator:
    """Add ``--example``, and an option for each size of the job.

    Args:
        defaults: by the name of the option of ``train_gpt.py``, in order.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--example",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            default=Path("examples/train_gpt.py"),
            show_default=True,
            help="It is in the repository.",
        )(command)
        for name, default in reversed(defaults.items()):
            command = click.option(
                f"--{name.replace('_', '-')}",
                type=click.IntRange(_LEAST.get(name, 1)),
                default=default,
                show_default=True,
            )(command)
        return command

    return add
