"""Real text, split into training text and held-out text.

The default is the source text of Python's standard library, about 11 MB that every machine with
Python has. The path of a file alone decides whether it is held out, so all peers with the same
files split them equally.
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
"""Approximate share of the files that are held out."""

NOT_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Folders of the standard library to skip: data for tests, and installed packages."""

END = b"\0"
"""The byte after each file."""


@dataclass(frozen=True, slots=True)
class Text:
    """The training text and the held-out text, from different files.

    Attributes:
        training: concatenated files, uint8.
        held_out: concatenated files, uint8.
    """

    training: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]

    def batch(self, count: int, length: int, *, seed: int, peer: int, step: int) -> Tensor:
        """Return the batch of one peer in one step: a pure function of the arguments.

        So a run that resumes from a checkpoint draws the same batches, different modes train on the
        same batches, and no two peers draw the same batch.

        Args:
            count: number of excerpts, which begin at random places of the training text.
            length: length of each excerpt, in bytes.
            seed: seed of the run.
            peer: number of the peer.
            step: number of the inner step.

        Returns:
            int64, shape (count, length).
        """
        chance = np.random.default_rng((seed, peer, step))
        starts = chance.integers(0, len(self.training) - length + 1, count)
        return excerpts(self.training, starts, length)

    def held_out_excerpts(self, count: int, length: int) -> Tensor:
        """Return ``count`` excerpts, evenly spread over the held-out text; equal on all peers.

        Returns:
            int64, shape (count, length).
        """
        starts = np.linspace(0, len(self.held_out) - length, count).astype(np.int64)
        return excerpts(self.held_out, starts, length)


def excerpts(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], length: int) -> Tensor:
    """Return ``length`` bytes from each start on, int64, shape (starts, length)."""
    return torch.tensor(text[starts[:, None] + np.arange(length)], dtype=torch.int64)


def load(folder: Path | None, length_min: int) -> Text:
    """Read a folder of text.

    Args:
        folder: folder whose files are read, also in subfolders, except hidden files and files that
            hold a zero byte. None: the ``*.py`` files of the standard library.
        length_min: smallest length of the training text and of the held-out text, in bytes.

    Raises:
        ValueError: the folder does not exist, or holds too little text.
        OSError: a file cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in files(folder):
        content = path.read_bytes()
        if END not in content:
            parts[is_held_out(name)].append(content + END)
    training, held_out = (b"".join(parts[which]) for which in (False, True))
    for what, text in (("for training", training), ("held out", held_out)):
        if len(text) < length_min:
            raise ValueError(
                f"{folder or 'the standard library'} has {len(text)} bytes {what}, but the model "
                f"needs at least {length_min}; give a folder with more text files"
            )
    return Text(np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8))


def files(folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield each file, sorted: its path relative to the folder, with slashes, and its full path."""
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
    """Whether a file is held out, by its path relative to the folder."""
    hashed = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(hashed[:4]) < HELD_OUT_SHARE * 2**32
