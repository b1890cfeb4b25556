"""On SIGTERM, this peer leaves the run before the program ends, so that no member waits for it.

``pccl launch`` and ``pccl join`` set ``PCCL_DRAIN=1``. The first communicator that the main thread
then makes installs a SIGTERM handler, unless the program has one. The handler closes every
communicator of the process, so that open calls in other threads raise ``NotConnected``. Then the
handler raises ``SystemExit`` in the main thread: ``finally`` and ``with`` blocks and exit handlers
run, and the exit status is 143.

Like every Python handler, it runs only when the main thread returns from C code.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType

from pccl._api.session import Session

_open: weakref.WeakSet[Session] = weakref.WeakSet()
_pid = 0
"""Id of the process in which the handler is installed."""


def drain(session: Session) -> None:
    """Close ``session`` on SIGTERM, unless the program has its own handler."""
    global _pid
    _open.add(session)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_sigterm):
        _pid = os.getpid()
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    if os.getpid() != _pid:  # a forked child is no peer, and ends as if this handler were absent
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    for session in list(_open):
        session.close()
    raise SystemExit(128 + signum)
