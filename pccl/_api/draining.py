"""On SIGTERM, this peer leaves the run before the program ends, so that no member waits for it.

``pccl launch`` and ``pccl join`` set ``PCCL_DRAIN=1``. The first communicator that the main thread
then makes installs a SIGTERM handler, unless the program has one.

If a wrapper has work to hand over, the handler only gives it notice, for ``PCCL_DRAIN_S``. The
wrapper hands the work over, closes its communicator, and raises ``SystemExit(0)``.

Otherwise, and when the notice is over, the handler closes every communicator of the process, so
that open calls in other threads raise ``NotConnected``. Then it raises ``SystemExit`` in the main
thread: ``finally`` and ``with`` blocks and exit handlers run. The exit status is 0 if the wrappers
had no work, otherwise 143.

Like every Python handler, it runs only when the main thread returns from C code.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from types import FrameType

from pccl._api.session import Session

_log = logging.getLogger("pccl.peer")

_open: weakref.WeakSet[Session] = weakref.WeakSet()
_pid = 0
"""Id of the process in which the handler is installed."""


class _Notice:
    """The notice of this process.

    Attributes:
        seconds: how long it lasts.
        is_given: whether SIGTERM has begun it.
        is_over: whether it has ended, and work may be left.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_given = self.is_over = False

    def end(self) -> None:
        """Let the handler run again, unless all wrappers have left. I/O thread."""
        if self.is_over or not any(
            session.is_leaving and not session.closed for session in list(_open)
        ):
            return
        self.is_over = True
        _log.warning(
            "this peer leaves %g s after SIGTERM (PCCL_DRAIN_S), before its work was handed over",
            self.seconds,
        )
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


_notice = _Notice()


def drain(session: Session, notice_s: float) -> None:
    """Close ``session`` on SIGTERM, unless the program has its own handler.

    Args:
        session: the session.
        notice_s: seconds for a wrapper that has work to hand over.
    """
    global _pid
    _open.add(session)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_sigterm):
        _pid, _notice.seconds = os.getpid(), notice_s
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    if os.getpid() != _pid:  # a forked child is no peer, and ends as if this handler were absent
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    status = 128 + signum
    if not _notice.is_over:
        if _notice.is_given:
            return  # a repetition
        prepared = [one for one in list(_open) if one.has_work is not None and not one.closed]
        working = [one for one in prepared if one.has_work is not None and one.has_work()]
        if working and _notice.seconds:
            _notice.is_given = True
            for session in working:
                session.give_notice(_notice.seconds, _notice.end)
            return
        if prepared and not working:
            status = 0
    for session in list(_open):
        session.close()
    raise SystemExit(status)
