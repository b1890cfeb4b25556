"""Real text, split into what is trained on and what is held out.

Without a folder it is the source text of Python's own standard library, some 11 MB that lie on
every machine that can run this. Which files are held out depends on their paths alone, so all peers
that have the same files split them alike.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HELD_OUT_SHARE = 0.1
"""Of the files, about."""

NOT_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Folders of the standard library that are left out: data for tests, and what is installed."""

END = b"\0"
"""Comes after each file."""


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes to judge by, none of them in both.

    Attributes:
        training: uint8, one file after the other.
        held_out: likewise.
    """

    training: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]

    def batch(self, count: int, length: int, *, seed: int, peer: int, step: int) -> Tensor:
        """What one peer trains on in one step: a pure function of the arguments.

        So a run that resumes from a checkpoint draws what it would have drawn, two modes are
        compared on the same batches, and no two peers draw alike.

        Args:
            count: of excerpts, which begin anywhere in the training text.
            length: of each, in bytes.
            seed: of the run.
            peer: whose batch it is.
            step: the inner step.

        Returns:
            int64, shape (count, length).
        """
        chance = np.random.default_rng((seed, peer, step))
        starts = chance.integers(0, len(self.training) - length + 1, count)
        return excerpts(self.training, starts, length)

    def held_out_excerpts(self, count: int, length: int) -> Tensor:
        """The same for everyone: so many excerpts, evenly spread over the held-out text.

        Returns:
            int64, shape (count, length).
        """
        starts = np.linspace(0, len(self.held_out) - length, count).astype(np.int64)
        return excerpts(self.held_out, starts, length)


def excerpts(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], length: int) -> Tensor:
    """So many bytes from each start on; int64, shape (starts, length)."""
    return torch.tensor(text[starts[:, None] + np.arange(length)], dtype=torch.int64)


def load(folder: Path | None, length_min: int) -> Text:
    """Read a folder of text.

    Args:
        folder: every file in it and below counts, but hidden ones and those that hold a zero byte;
            None: the ``*.py`` files of the standard library.
        length_min: of the training text and of the held-out text, in bytes.

    Raises:
        ValueError: there is no such folder, or less text than that.
        OSError: a file cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in files(folder):
        content = path.read_bytes()
        if END not in content:
            parts[is_held_out(name)].append(content + END)
    training, held_out = (b"".join(parts[which]) for which in (False, True))
    for what, text in (("to train on", training), ("held out", held_out)):
        if len(text) < length_min:
            raise ValueError(
                f"of {folder or 'the standard library'}, {len(text)} bytes are {what};"
                f" at least {length_min} are needed: name a folder with more files of text"
            )
    return Text(np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8))


def files(folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Each file and its path relative to the folder, with slashes, in the order of these."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    unwanted = NOT_THE_LIBRARY if folder is None else frozenset[str]()
    found: dict[str, Path] = {}
    for place, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not name.startswith((".", "__")) and name not in unwanted
        ]
        for name in names:
            path = Path(place) / name
            is_text = name.endswith(".py") if folder is None else not name.startswith(".")
            if is_text and path.is_file():
                found[path.relative_to(root).as_posix()] = path
    yield from sorted(found.items())


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training, by its path relative to the folder."""
    hashed = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(hashed[:4]) < HELD_OUT_SHARE * 2**32
