"""Processes behind a firewall or NAT: they dial others, and nobody can dial them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

from pccl.stress.sim.faults.base import Fault, Ground

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage


@dataclass(frozen=True)
class BehindNat(Fault):
    """From the start to the end, whichever process runs there."""

    kind: ClassVar[str] = "undialable"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    peers: tuple[int, ...]
    refuses: bool
    """Whether a dial is refused; otherwise it is never answered."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground) -> Self:
        """Draw one: often of a single process, to which all others have links then."""
        count = 1 if rng.random() < 0.5 else rng.randint(1, ground.peers)
        return cls(tuple(sorted(rng.sample(range(ground.peers), count))), rng.random() < 0.5)

    def plant(self, stage: Stage) -> None:
        """Shut their ports."""
        stage.struck(self)
        for index in self.peers:
            name = stage.name(index)
            stage.network.shut[name] = self.refuses
            stage.excuses.shut(name)

    @property
    def indices(self) -> tuple[int, ...]:
        """All that it names."""
        return self.peers
