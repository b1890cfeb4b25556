"""The application of a process that trains, in one or several lives."""

from __future__ import annotations

from functools import partial

from pccl.protocol.errors import DeadlineExceeded, MembershipError, PCCLError
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.workloads.application import Application
from pccl.stress.sim.workloads.training_life import TrainingLife
from pccl.stress.sim.workloads.training_plan import LIVES_MAX


class TrainingWorkload(Application):
    """The application of one process: at most ``LIVES_MAX`` lives."""

    lives_max = LIVES_MAX
    begins_anew_after = (MembershipError, DeadlineExceeded)

    def __init__(self, parts: RunParts, process: PeerProcess) -> None:
        super().__init__(parts, process)
        self._begin = partial(TrainingLife, parts, process, self.sleep)

    async def _live(self, life: int) -> None:
        await self._begin().run()

    def _is_final(self, error: PCCLError) -> bool:
        self._checkers.done[f"training ended: {type(error).__name__}"] += 1
        return self._checkers.nobody_to_join

    def interrupt(self) -> None:
        """Do nothing, because no Ctrl-C reaches the thread that makes the calls."""
