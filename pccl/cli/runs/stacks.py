"""The folders in which peers put their stacks for ``pccl why``.

Peers of ``pccl join`` share the private folder of their user. Each ``pccl launch`` has a folder of
its own. The launch holds a lock on it, and the system releases the lock when the process ends,
whatever ends it. So the next launch can remove the folder of a launch that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from pccl.cli.runs.run_file import objection_to, private_folder

PREFIX = "pccl-stacks-"

NEW_S = 60.0
"""A folder of this age, or younger, may be one that a launch has made and not locked yet."""


def joined_folder() -> str:
    """Return the folder for peers of ``pccl join``; remove the files of processes that have ended.

    Raises:
        Unusable: no folder is safe.
    """
    folder = private_folder()
    for path in folder.iterdir():
        pid, _, ending = path.name.partition(".")
        is_ours = ending in ("names", "stacks") and re.fullmatch(r"\d{1,10}", pid)
        if is_ours and not os.path.isdir(f"/proc/{pid}"):
            path.unlink(missing_ok=True)
    return str(folder)


@contextlib.contextmanager
def stacks_folder() -> Generator[str, None, None]:
    """Make a private folder for the length of the block, and remove those of killed launches."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, or no folder, or just removed
            _remove_stale(path)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as made:
        folder = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield made
        finally:
            os.close(folder)


def _remove_stale(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        is_new = time.time() - found.st_mtime <= NEW_S
        if not is_new and not objection_to(found, os.geteuid()):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(folder)
