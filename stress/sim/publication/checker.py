"""``PublicationChecker``: what readers may show, and when all of them must have the last version.

The contents of a version follow from the seed and its number, so all members publish the same. A
reader shows only contents that a member has published, complete, and never changes what it has
shown. All members publish a last version when they have finished, and stay until all living readers
have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from random import Random

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import NS_PER_S
from pccl.runtime.publishing.reader import ReadVersion
from pccl.stress.sim.checkers.outcomes import Violation

LAST = 1_000_000_000
"""Number of the last version."""

PATIENCE_NS = 120 * NS_PER_S
"""Time in which all readers must have the last version, while all members do nothing else."""

_DTYPES = (np.float32, np.uint8, np.float64, np.int16, np.float32)
_PUBLISH_NS = NS_PER_S
"""Virtual time of a call that copies a state; no reader may make it longer."""

Array = npt.NDArray[np.generic]


class PublicationChecker:
    """Checks what members publish and readers show.

    Args:
        seed: seed of the run.
        done: counts by name.
        now_ns: returns the virtual time.
    """

    def __init__(self, seed: int, done: Counter[str], now_ns: Callable[[], int]) -> None:
        self.done = done
        self.working: Callable[[], set[str]] = set
        """Returns the names of the processes that have not finished, those that wait included."""
        self.readers: set[str] = set()
        """Names of the readers that live, or will live again."""
        self._seed = seed
        self._now_ns = now_ns
        self._published: set[int] = set()
        self._shown: dict[str, int] = {}
        self._held: dict[str, ReadVersion] = {}
        self._waiting: dict[str, int] = {}
        """Process -> since when it waits for readers."""
        self.contents = lru_cache(64)(self._contents)

    def _contents(self, number: int) -> tuple[bytes, ...]:
        """Return the bytes of all tensors of a version: most elements are those of any other."""
        first = Random(f"{self._seed}/published")
        rng = Random(f"{self._seed}/published/{number}")
        found: list[bytes] = []
        for dtype in _DTYPES:
            array = np.frombuffer(first.randbytes(np.dtype(dtype).itemsize * 700), np.uint8).copy()
            for _ in range(rng.choice((0, 1, 5, 5, 2000))):
                array[rng.randrange(len(array))] = rng.randrange(256)
            found.append(array.tobytes())
        return tuple(found)

    def arrays(self) -> list[Array]:
        """Return memory for the tensors of a version."""
        return [np.zeros(700, dtype) for dtype in _DTYPES]

    # -- members ---------------------------------------------------------------------------------

    def publishes(self, number: int) -> int:
        """Record that a member begins to publish; return the time."""
        self._published.add(number)
        return self._now_ns()

    def has_published(self, name: str, began_ns: int) -> None:
        """Check that a member has not waited for anybody."""
        self.done["version published"] += 1
        if self._now_ns() - began_ns > _PUBLISH_NS:
            raise Violation(f"{name} waited {self._now_ns() - began_ns} ns until it had published")

    def may_go(self, name: str) -> bool:
        """Whether a member that has finished may leave: all readers have the last version.

        Members that still work may wait for it in a joint call, so then it leaves after a while.
        """
        now_ns = self._now_ns()
        waited_ns = now_ns - self._waiting.setdefault(name, now_ns)
        late = sorted(one for one in self.readers if self._shown.get(one) != LAST)
        if not late:
            self.done["readers have the last version"] += 1
            return True
        together_ns = now_ns - max(self._waiting.values())
        if self.working() - self._waiting.keys():
            return waited_ns >= PATIENCE_NS // 6
        if together_ns >= PATIENCE_NS:
            shown = {one: self._shown.get(one) for one in late}
            raise Violation(f"readers have not reached the last version: {shown}")
        return False

    def goes(self, name: str) -> None:
        """Record that a member waits no more."""
        self._waiting.pop(name, None)

    # -- readers ---------------------------------------------------------------------------------

    def begins(self, name: str) -> None:
        """Record that a reader begins anew."""
        self._shown.pop(name, None)
        self._held.pop(name, None)

    def showed(self, name: str, read: ReadVersion) -> None:
        """Check a version that a reader shows, and the one that it has shown before."""
        number = read.version.number
        if number not in self._published:
            raise Violation(f"{name} shows version {number}, which nobody has published")
        before = self._held.get(name)
        for one in (before, read) if before is not None else (read,):
            wanted = self.contents(one.version.number)
            if tuple(map(bytes, one.memory.views)) != wanted:
                raise Violation(f"{name} shows other bits of version {one.version.number}")
        self._held[name], self._shown[name] = read, number
        self.done["version read"] += 1
