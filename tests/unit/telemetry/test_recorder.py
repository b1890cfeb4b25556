"""The recorder: its memory, and the record in a form that fits an answer."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.limits import EVIDENCE_BYTES_MAX
from pccl.protocol.operation import Phase
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp
from pccl.telemetry import events as tell
from pccl.telemetry.clocks import SAMPLES_MAX, ClockSample
from pccl.telemetry.evidence import unpack_evidence
from pccl.telemetry.recorder import (
    PHASES_MAX,
    SEGMENTS_MAX,
    Recorder,
    Snapshot,
    pack_record,
    record_of,
)
from pccl.telemetry.records import check_record
from pccl.telemetry.stream import KEPT_MAX, EventStream

MIB = 1 << 20
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 1024)


def fill(recorder: Recorder, stream: EventStream, rng: random.Random, calls: int) -> None:
    """Small calls of two peers: each has two segments out, two in, and four phases."""
    for n in range(calls):
        operation = OperationId(10**6, 10**6, 10**6, 10**12 + n, 10**6 + n)
        at_ns = 10**15 + rng.randrange(10**14)
        for phase in (Phase.REQUESTED, Phase.STARTED, Phase.DONE, Phase.COMMITTED):
            what = SUM if phase is Phase.REQUESTED else None
            recorder.phases.append((at_ns + rng.randrange(10**6), phase, operation, what))
        for step in range(4):
            offset, check = rng.randrange(10**9), rng.randrange(1 << 63)
            header = FrameHeader(FrameKind.DATA, operation, step, offset, 10**5 + n, check=check)
            began_ns = at_ns + rng.randrange(10**6)
            times = began_ns, began_ns + rng.randrange(10**6)
            moved = (*times, PeerId(1000), step % 2, step < 2, header.length, header)
            recorder.segments.append(moved)
        ended = tell.CallEnded(
            call="all_reduce",
            tag=operation.tag,
            outcome="ok",
            reason="",
            seconds=rng.random(),
            attempts=1,
            tx_bytes=10**6 + n,
            rx_bytes=10**6 + n,
            waited_s=rng.random(),
            moved_s=rng.random(),
        )
        stream.put(ended, at_ns)


def snapshot_of(recorder: Recorder, stream: EventStream, **changed: object) -> Snapshot:
    fields: dict[str, object] = {
        "name": "alice",
        "host": "gpu-07",
        "pid": 7,
        "run": "ab" * 16,
        "peer_ids": (PeerId(3),),
        "now_ns": 2 * 10**15,
        "time_s": 1.7e9,
        "clock": [ClockSample(n, n - 5, n + 5) for n in range(SAMPLES_MAX)],
        "events": tuple(stream.kept),
        "open_calls": ((10**15, "update_topology", None),),
        "phases": tuple(recorder.phases),
        "segments": tuple(recorder.segments),
    }
    return Snapshot(**{**fields, **changed})  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def test_a_full_recorder_takes_at_most_4_mib() -> None:
    """With the stream of events, and operations that nothing else keeps."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        recorder, stream = Recorder(), EventStream()
        fill(recorder, stream, random.Random(1), 4 * KEPT_MAX)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    full = len(recorder.segments), len(recorder.phases), len(stream.kept)
    assert full == (SEGMENTS_MAX, PHASES_MAX, KEPT_MAX)
    assert used <= 4 * MIB


def test_a_record_says_all() -> None:
    recorder, stream = Recorder(), EventStream()
    fill(recorder, stream, random.Random(2), 3)
    record = check_record(record_of(snapshot_of(recorder, stream)))
    assert (record.name, record.host, record.pid, record.peer_ids) == ("alice", "gpu-07", 7, (3,))
    assert [each.phase for each in record.phases[:4]] == [
        *(Phase.REQUESTED, Phase.STARTED, Phase.DONE, Phase.COMMITTED)
    ]
    assert [each.sent for each in record.segments[:4]] == [True, True, False, False]
    for (*times, peer, lane, _, length, header), told in zip(
        recorder.segments, record.segments, strict=True
    ):
        assert times == [told.began_ns, told.ended_ns]
        assert (peer, lane, length) == (told.peer, told.lane, told.length)
        where = told.operation, told.step, told.offset
        assert (header.operation, header.step, header.offset) == where
    assert set(record.requests.values()) == {"SUM of 1024 x float32"}
    assert [(kind, told["tag"]) for _, kind, told in record.events] == [
        ("CallEnded", 10**12 + n) for n in range(3)
    ]
    assert [call.name for call in record.open_calls] == ["update_topology"]
    assert record.left_out == 0


def test_a_long_record_leaves_out_what_is_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = EVIDENCE_BYTES_MAX // 4
    monkeypatch.setattr("pccl.telemetry.recorder.EVIDENCE_BYTES_MAX", shorter)
    recorder, stream = Recorder(), EventStream()
    fill(recorder, stream, random.Random(3), 4 * KEPT_MAX)
    snapshot = snapshot_of(recorder, stream)
    data = pack_record(snapshot)
    assert shorter // 2 < len(data) <= shorter
    record = check_record(unpack_evidence(data))
    assert record.left_out > 0
    whole = check_record(record_of(snapshot))
    assert record.segments == whole.segments[-len(record.segments) :]
    assert record.phases == whole.phases[-len(record.phases) :]
    assert record.clock == whole.clock
