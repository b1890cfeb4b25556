"""SIGTERM as a goodbye: this peer leaves the run before the program ends, so nobody waits for it.

``pccl launch`` and ``pccl join`` ask for it by ``PCCL_DRAIN=1``. The first communicator that is
then made in the main thread takes SIGTERM over, if nobody else has: a program with a handler of its
own keeps it. On SIGTERM every communicator of the process is closed, which ends the calls that
other threads are in with ``NotConnected``; then the main thread gets ``SystemExit``, so that
``finally`` and ``with`` blocks and exit handlers run, and the exit status is 143.

Like every handler in Python it runs when the main thread comes back from what it does in C.
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
"""The process that has taken SIGTERM over."""


def drain(session: Session) -> None:
    """Close ``session`` on SIGTERM, if that is ours to take."""
    global _pid
    _open.add(session)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_sigterm):
        _pid = os.getpid()
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    if os.getpid() != _pid:  # a child made by fork: it is no peer, and ends as if we were not here
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    for session in list(_open):
        session.close()
    raise SystemExit(128 + signum)
