"""Raises the limit on open file descriptors of this process, as far as the system allows it."""

from __future__ import annotations

import sys
from contextlib import suppress

from pccl.protocol.limits import DESCRIPTORS_WANTED

_UNKNOWN = 2048
"""The assumed limit on systems that do not report one."""


def claim_descriptors() -> int:
    """Raise the soft limit on open descriptors towards the hard one; return the new soft limit.

    The limit applies to this process and its child processes. This function never lowers it.
    """
    if sys.platform == "win32":
        return _UNKNOWN
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_WANTED
    wanted = DESCRIPTORS_WANTED
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a second limit, which it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft
