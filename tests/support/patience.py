"""How long tests wait: the one place for limits on real time.

A limit in a test is there for a hang, so it is far above what a test needs, and it grows with what
the machine shows when the tests start: a fixed piece of work is timed once, beside whatever else
the machine is doing. ``PCCL_TEST_PATIENCE=4`` says the factor instead of measuring it. Processes
that tests start inherit it.

- ``LIMIT_S``: a call, an answer of another process, a thread that ends: what takes seconds.
- ``LONG_LIMIT_S``: a process that works for a while: a simulation, a benchmark, a training.
- ``patient(3.0)``: a time that the library promises, with the room that this machine needs.
"""

from __future__ import annotations

import math
import os
import threading
import time
import zlib

VARIABLE = "PCCL_TEST_PATIENCE"

_USUAL_S = 0.1
"""What the piece of work takes on an idle machine of the kind that the limits were chosen on."""


def _measured() -> float:
    """How many times slower than usual this machine is, now; at least 1.

    Two threads work, because `make test` uses several processes. The slowest of three goes counts,
    since what the machine does beside the tests comes and goes.
    """
    work = b"".join(number.to_bytes(4, "big") * 2 for number in range(1 << 17))
    slowest_s = 0.0
    for _ in range(3):
        threads = [threading.Thread(target=zlib.compress, args=(work, 6)) for _ in range(2)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    return max(1.0, round(slowest_s / _USUAL_S, 1))


def _patience() -> float:
    said = os.environ.get(VARIABLE)
    if said is None:
        factor = _measured()
        os.environ[VARIABLE] = str(factor)
        return factor
    try:
        factor = float(said)
    except ValueError:
        factor = 0.0
    if not (factor > 0 and math.isfinite(factor)):
        raise SystemExit(f"{VARIABLE} must be a number above 0, and it is {said!r}")
    return factor


PATIENCE = _patience()
"""By how much every limit is multiplied."""


def patient(seconds: float) -> float:
    """So many seconds, and more of them on a machine that is slow or busy."""
    return seconds * PATIENCE


# Below ``faulthandler_timeout`` in pyproject.toml, which ends the whole process.
LIMIT_S = min(patient(120.0), 400.0)
LONG_LIMIT_S = 800.0
