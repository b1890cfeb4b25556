"""Asks a master for the status of its run, from a process outside the run."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Any

from pccl.checks import check_timeout
from pccl.config import resolve_masters, resolve_token
from pccl.errors import PCCLError, named
from pccl.protocol.limits import SECONDS_MAX
from pccl.protocol.status_report import (
    EndedStatus,
    GroupStatus,
    LinkSpeed,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalStatus,
    RoundStatus,
)
from pccl.protocol.status_report import StatusReport as MasterStatus
from pccl.protocol.types import RemovalCause, RoundId
from pccl.runtime.clock import LoopClock
from pccl.runtime.control.greeting import Credentials
from pccl.runtime.control.question import ask_status
from pccl.runtime.io_thread import IOThread
from pccl.transports.base import Address

__all__ = [
    "EndedStatus",
    "GroupStatus",
    "LinkSpeed",
    "MasterStatus",
    "MemberStatus",
    "NewcomerStatus",
    "OperationStatus",
    "RemovalCause",
    "RemovalStatus",
    "RoundStatus",
    "master_status",
    "to_json",
]

TIMEOUT_S = 5.0


def master_status(
    address: str | None = None,
    *,
    token: str | bytes | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> MasterStatus:
    """Ask a master for the status of its run. Blocks; changes nothing in the run.

    Args:
        address: address of the master, ``"host:port"``. For several, separated by commas, the
            result is that of the first with members, else of the first. None: ``PCCL_MASTER``.
        token: the secret of the run; None: ``PCCL_TOKEN`` or ``PCCL_TOKEN_FILE``.
        timeout_s: limit for each master, in seconds; None: no limit.

    Raises:
        LinkError: no master listens there, or none answered in time.
        NotAdmitted: the master refuses the request; the reason says why.
        RemoteProtocolError: no master of this version listens there, or its token differs.
        TypeError, ValueError: the address is malformed, or the token is not good.
    """
    masters, secret = resolve_masters(address), resolve_token(token)
    limit_s = check_timeout(timeout_s) or SECONDS_MAX
    user = object()
    try:
        io = IOThread.acquire(user)
        return io.submit(lambda: _ask_in_turn(io, masters, secret, limit_s)).wait()
    except PCCLError as error:
        raise named(error, "master_status") from None
    finally:
        IOThread.give_up(user)


async def _ask_in_turn(
    io: IOThread, masters: Sequence[Address], secret: bytes | None, limit_s: float
) -> MasterStatus:
    """Return the first status with members, else the first; a standby without a run has none."""
    idle: MasterStatus | None = None
    failure: PCCLError | None = None
    for master in masters:
        try:
            status = await ask_status(
                LoopClock(io.loop), io.transport, master, Credentials(secret, os.urandom), limit_s
            )
        except PCCLError as error:
            failure = error
            continue
        if status.member_count:
            return status
        idle = idle or status
    if idle is None:
        assert failure is not None
        raise failure
    return idle


def to_json(status: MasterStatus) -> dict[str, Any]:
    """Convert a status for ``json.dumps``: enums to names, ids to numbers, bytes to hex."""
    return {field.name: _plain(getattr(status, field.name)) for field in dataclasses.fields(status)}


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case enum.Enum():
            return value.name
        case RoundId(kind, n):
            return {"call": kind.call_name, "n": n}
        case tuple():
            return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _ if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: _plain(getattr(value, name)) for name in names}
        case _:
            return value
