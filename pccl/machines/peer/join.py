"""One attempt of a peer to become a member: how often a master was tried, and with what result."""

from __future__ import annotations

from pccl.machines.peer.events import JoinCall
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import JOIN_REASONS_MAX


class JoinAttempt:
    """What a ``JoinCall`` has set off, until it is admitted or fails."""

    def __init__(self, event: JoinCall) -> None:
        self.call = event.call
        self.rejoins = event.rejoins
        self.masters = event.masters
        self.waits_for = ""
        """What the admission waits for, as far as the master has said."""
        self._event = event
        self._failures = 0
        self._reasons: dict[str, None] = {}

    def register(self) -> msg.Register:
        """The first message to a master."""
        event = self._event
        return msg.Register(
            event.group, event.host, event.port, event.min_peers, event.masters, event.prefetches
        )

    def failed(self, reason: str) -> errors.MasterLost | None:
        """No master this time; return what to raise if that was the last attempt."""
        self._failures += 1
        self._reasons[reason] = None
        attempts = self._event.attempts
        if self._failures < attempts:
            return None
        reasons = "; ".join(list(self._reasons)[-JOIN_REASONS_MAX:])
        tries = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        text = f"no master after {tries}: {reasons}; is it running there?"
        return errors.MasterLost(errors.Result.MASTER_CONNECTION_FAILED, reason=text)
