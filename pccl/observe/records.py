"""Records of peers as files, and the trace that is made of them.

A peer with ``PCCL_RECORD`` writes its record on SIGQUIT, and when it loses its membership. ``pccl
record`` asks peers for theirs. Either way, a file holds one record, or ``{"records": [...],
"unanswered": {...}}``. :mod:`pccl.telemetry.recorder` describes a record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pccl.protocol.guards.texts import printable
from pccl.telemetry.records import Record, check_record
from pccl.telemetry.trace import merge

__all__ = ["Record", "check_record", "merge", "read_records", "write_json"]

FILE_BYTES_MAX = 1 << 30
"""The largest file of records that is read."""


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as JSON to a file that only this user may read, at once or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    place = Path(path)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(value, stream, separators=(",", ":"))
        temporary.replace(place)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_records(
    paths: Iterable[str | os.PathLike[str]],
) -> tuple[list[Record], Mapping[str, str]]:
    """Return the records in files; and by name, why peers gave none when they were asked.

    Raises:
        ValueError: a file cannot be read, or has no valid record; the error names the file.
    """
    records: list[Record] = []
    unanswered: dict[str, str] = {}
    for path in paths:
        try:
            if Path(path).stat().st_size > FILE_BYTES_MAX:
                raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
            value: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
            if type(value) is dict and "records" in value:
                records += map(check_record, value["records"])
                absent: dict[str, str] = dict(value["unanswered"])
                unanswered |= {
                    printable(name[:99]): printable(str(why)) for name, why in absent.items()
                }
            else:
                records.append(check_record(value))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error
    return records, unanswered
