"""The answers of a peer to questions through the master: its state, its record, its stacks.

Any process that may ask for the status may also ask for state and record. Stacks show code and file
names, so a peer sends them only in a run with a token, and not with ``PCCL_STACKS=0``.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict
from typing import Any

from pccl._api.callers import Callers
from pccl._api.recording import snapshot_of
from pccl._api.reports import status_of
from pccl.config import resolve_stacks
from pccl.observe.stacks import stacks
from pccl.protocol.run_messages import EvidenceKind
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import PeerOptions
from pccl.telemetry.evidence import pack_evidence
from pccl.telemetry.recorder import pack_record

RECORDS_MAX = 4
"""Questions for the record that are open. One is answered at a time: a long record takes a fifth of
a second of a processor."""


class Evidence:
    """Answers questions about one peer.

    Args:
        engine: the peer.
        options: its settings.
        callers: the threads and tasks of its program that make joint calls.
    """

    def __init__(self, engine: PeerEngine, options: PeerOptions, callers: Callers) -> None:
        self._engine, self._options, self._callers = engine, options, callers
        self._records = 0
        self._turn = asyncio.Lock()

    async def give(self, kind: EvidenceKind) -> tuple[bytes, str]:
        """Return the answer, compressed, and why there is none. I/O thread."""
        match kind:
            case EvidenceKind.STATE:
                found: Any = self._state()
            case EvidenceKind.STACKS:
                if self._options.token is None or not resolve_stacks():
                    why = "the run has no token" if self._options.token is None else "PCCL_STACKS=0"
                    return b"", f"this peer gives no stacks: {why}"
                found = stacks()
            case EvidenceKind.RECORD:
                return await self._record()
            case EvidenceKind.PROCESS:
                return b"", "a peer does not judge its own process"
        return await asyncio.to_thread(pack_evidence, found), ""

    async def _record(self) -> tuple[bytes, str]:
        if self._records >= RECORDS_MAX:
            return b"", f"{RECORDS_MAX} others ask this peer for its record; ask again later"
        self._records += 1
        try:
            async with self._turn:
                snapshot = snapshot_of(self._engine, self._options.name)
                return await asyncio.to_thread(pack_record, snapshot), ""
        finally:
            self._records -= 1

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        status = asdict(status_of(engine)) if engine.machine.seen is not None else {}
        return {
            **status,
            "name": self._options.name,
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "now_ns": engine.now_ns(),
            "time_s": time.time(),
            "step": engine.step,
            "loss": engine.loss,
            "all_callers_inside": self._callers.all_blocked(),
            "narrow_links": [
                {"peer_id": peer, "segment_bytes": segment_bytes}
                for peer, segment_bytes in engine.narrow_links.items()
                if engine.links.find(peer) is not None
            ],
            "paths": [
                {
                    "peer_id": link.peer,
                    "lane": lane.number,
                    "backlog_bytes": lane.backlog_bytes,
                    **asdict(measured),
                }
                for link in engine.links.all()
                for lane in link.lanes
                if (measured := lane.connection.measure()) is not None
            ],
        }
