"""Evidence for people: whatever happens while it is gathered, there is an answer."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from pccl.protocol.guards.texts import printable, shortened
from pccl.protocol.limits import EVIDENCE_BYTES_MAX
from pccl.protocol.run_messages import EvidenceKind

REASON_BYTES_MAX = 400
"""Length of an error in an answer."""

EvidenceSource: TypeAlias = Callable[[EvidenceKind], Awaitable[tuple[bytes, str]]]
"""Returns the data, and why there is none."""


async def gathered(work: Awaitable[tuple[bytes, str]]) -> tuple[bytes, str]:
    """Wait for evidence; return the data, and why there is none.

    An error becomes such a reason. The loop's exception handler gets it too: it is a bug.
    """
    try:
        data, refusal = await work
    except Exception as error:  # noqa: BLE001 - reported below
        reason = "".join(traceback.format_exception_only(error)).strip()
        context = {"message": "gathering evidence failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        return b"", shortened(printable(f"gathering evidence failed: {reason}"), REASON_BYTES_MAX)
    if len(data) > EVIDENCE_BYTES_MAX:
        return b"", f"the evidence has {len(data)} bytes, and at most {EVIDENCE_BYTES_MAX} are sent"
    return data, refusal
