"""``Application``: what a simulated process runs on top of the library."""

from __future__ import annotations

from typing import Protocol

from pccl.stress.sim.checkers.outcomes import InRun


class Application(Protocol):
    """One of one process.

    Attributes:
        ended_with: why it stopped; None while it runs.
        last_vote: the last operation in which members agreed on whether to stop; None: they don't.
    """

    ended_with: str | None
    last_vote: InRun | None

    async def run(self) -> None:
        """Join, work, stop."""
        ...

    def leave(self) -> None:
        """Close the communicator, whatever goes on."""
        ...

    def interrupt(self) -> None:
        """Cancel the calls that the process is in."""
        ...

    async def sleep(self, duration_ns: int) -> None:
        """Let virtual time pass."""
        ...
