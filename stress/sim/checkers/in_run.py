"""``InRun``: an operation, and the run that it belongs to."""

from __future__ import annotations

from typing import NamedTuple

from pccl.protocol.types import OperationId


class InRun(NamedTuple):
    """An operation and its run, because another run may use the same operation ids."""

    run: bytes
    operation: OperationId

    def __str__(self) -> str:
        return f"{self.operation} of run {self.run.hex()[:8]}"
