"""The log lines of the library: time, level, ``pccl``, the process, what happened, why.

    2026-03-01T12:00:00.250Z INFO pccl alice: peer 3 (bob) is gone [SILENT]: silent for 10.0 s

The library logs under the name ``pccl``. If the program configures :mod:`logging` before it makes a
communicator, its handlers take the records. Otherwise the library shows them on stderr, from
``PCCL_LOG`` on: ``debug``, ``info``, ``warning`` (the default), ``error`` or ``off``. ``pccl
launch`` and ``pccl join`` set ``info``. With ``PCCL_LOG_TIME=local``, times are local.

A thread of its own writes the lines, so a paused terminal delays nothing (:mod:`handoff`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from pccl.observe.handoff import Handoff
from pccl.protocol.guards.texts import printable
from pccl.telemetry.events import CallEnded
from pccl.telemetry.stream import EventStream, Stamped
from pccl.telemetry.words import LogWords

LEVEL = "PCCL_LOG"
TIME = "PCCL_LOG_TIME"

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}

_log = logging.getLogger("pccl")
_events_log = logging.getLogger("pccl.events")


class LineFormatter(logging.Formatter):
    """Formats a record as one line, and its traceback below.

    Args:
        who: name of this process, for records that name no peer.
        local: whether times are local instead of UTC.
    """

    def __init__(self, who: str, *, local: bool) -> None:
        super().__init__("%(time)s %(levelname)s %(origin)s %(who)s: %(message)s")
        self._who, self._local = who, local

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC)
        text = (at.astimezone() if self._local else at).isoformat(timespec="milliseconds")
        record.time = text if self._local else text.replace("+00:00", "Z")
        record.origin = "pccl" if record.name.partition(".")[0] == "pccl" else record.name
        if not hasattr(record, "who"):
            record.who = self._who
        return super().format(record)


class ThreadedHandler(logging.Handler):
    """Writes records to a stream in a thread of its own, and never waits.

    Args:
        formatter: formats a record.
        stream: where the lines go; None: nowhere.
    """

    def __init__(self, formatter: logging.Formatter, stream: TextIO | None) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._write = _writer_to(stream)
        self._records = Handoff("pccl-log", self._take)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record."""
        self._records.put(record)

    def close(self) -> None:
        """Write what is queued, for at most a second, and stop."""
        self._records.close()
        super().close()

    def _take(self, record: logging.LogRecord) -> None:
        try:
            self._write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)


def _writer_to(stream: TextIO | None) -> Callable[[str], object]:
    """Return a function that writes a text to a stream.

    It takes no lock of the real stderr. The thread may wait there for a paused reader when the
    program ends, and the interpreter would wait for the lock.
    """
    if stream is None:
        return len
    known: TextIO = stream
    if known is sys.__stderr__:
        with suppress(OSError, ValueError):
            descriptor, encoding = stream.fileno(), stream.encoding

            def write(text: str) -> None:
                data = text.encode(encoding, "backslashreplace")
                while data:
                    data = data[os.write(descriptor, data) :]

            return write

    def write_and_flush(text: str) -> None:
        known.write(text)
        known.flush()

    return write_and_flush


def resolve_level() -> int | None:
    """Return the level in ``PCCL_LOG``; None: it is not set.

    Raises:
        ValueError: there is no such level.
    """
    text = (os.environ.get(LEVEL) or "").strip().lower()
    if not text:
        return None
    if text not in LEVELS:
        raise ValueError(f"{LEVEL} must be {', '.join(LEVELS)}, not {text[:32]!r}")
    return LEVELS[text]


def resolve_local_time() -> bool:
    """Whether the log shows local times; UTC by default.

    Raises:
        ValueError: ``PCCL_LOG_TIME`` is neither ``utc`` nor ``local``.
    """
    text = (os.environ.get(TIME) or "utc").strip().lower()
    if text not in ("utc", "local"):
        raise ValueError(f"{TIME} must be utc or local, not {text[:32]!r}")
    return text == "local"


def show_log(who: str) -> None:
    """Show the library's log on stderr, unless the program handles it. Calling again is harmless.

    Args:
        who: name of this process, for records that name no peer.

    Raises:
        ValueError: an environment variable is wrong; the error says which values exist.
    """
    level, local = resolve_level(), resolve_local_time()
    others = logging.getLogger().handlers
    if _log.handlers or (level is None and others):
        return
    if any(isinstance(other, ThreadedHandler) for other in others):
        return  # a command of ours shows the log
    _log.addHandler(ThreadedHandler(LineFormatter(who, local=local), sys.stderr))
    _log.setLevel(logging.WARNING if level is None else level)
    _log.propagate = False


def log_events(stream: EventStream, who: Callable[[], str]) -> None:
    """Log every later event of a peer or master.

    Args:
        stream: the events.
        who: returns the name of the peer or master.
    """
    words = LogWords()

    def write(stamped: Stamped) -> None:
        if type(stamped.event) is CallEnded and not _events_log.isEnabledFor(logging.DEBUG):
            return  # one for each call: say nothing before building a text
        level, text = words.line(stamped)
        _events_log.log(level, "%s", printable(text), extra={"who": who()})

    stream.listen(write)
