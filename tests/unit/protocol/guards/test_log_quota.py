"""Few lines about strangers, and one that counts the others."""

from __future__ import annotations

import logging

import pytest

from pccl.protocol.guards.log_quota import LogQuota
from pccl.protocol.types import NS_PER_S
from pccl.runtime.control.stranger_log import StrangerLog
from pccl.stress.sim.loop import VirtualLoop

LOG = logging.getLogger("pccl.link")


def test_a_few_lines_then_a_count() -> None:
    quota = LogQuota(lines_max=2, interval_ns=100)
    assert [quota.admit(now_ns) for now_ns in (10, 20, 30, 109)] == [True, True, False, False]
    assert quota.due_ns == 110
    assert not quota.admit(115)  # still to be counted
    assert quota.take_count() == 3
    assert quota.due_ns is None
    assert [quota.admit(now_ns) for now_ns in (120, 130, 140)] == [True, True, False]


def test_rare_lines_are_all_written() -> None:
    quota = LogQuota(lines_max=1, interval_ns=100)
    assert all(quota.admit(now_ns) for now_ns in range(0, 1000, 100))
    assert quota.due_ns is None


def test_ten_thousand_strangers_cause_a_line_a_second_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pccl")
    loop = VirtualLoop(limit_ns=600 * NS_PER_S)
    log = StrangerLog(loop, LOG)

    async def main() -> None:
        for number in range(10_000):  # 250 a second
            log.write(logging.INFO, "closed %s", number)
            if number % 1000 == 0:
                log.write(logging.WARNING, "bad %s", number)
            woken = loop.create_future()
            loop.call_at_ns(loop.now_ns() + NS_PER_S // 250, woken.set_result, None)
            await woken
        log.close()
        log.close()

    loop.run_until_complete(main())
    loop.close()
    lines = caplog.messages
    assert [line for line in lines if line.startswith("bad")] == [
        f"bad {number}" for number in range(0, 10_000, 1000)
    ]
    assert len(lines) <= 10 + 4 * 11 + 1
    counted = [line for line in lines if "more lines like these" in line]
    written = [line for line in lines if line.startswith("closed")]
    assert sum(int(line.split()[0]) for line in counted) + len(written) == 10_000
    assert counted[-1].endswith("within 10 s, the last: closed 9999")
