"""How many descriptors this process may have, and a few more if the system allows it."""

from __future__ import annotations

import sys
from contextlib import suppress

from pccl.protocol.limits import DESCRIPTORS_WANTED

_UNKNOWN = 2048
"""What we count on where the system has no such limit to ask for."""


def claim_descriptors() -> int:
    """Raise the soft limit of this process towards the hard one; return what it is then.

    The limit applies to the whole process and to those that it starts. It is never lowered.
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
        with suppress(OSError, ValueError):  # macOS has another limit, which it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft
