"""Nobody writes lines into the logs of others."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from pccl.machines.peer.events import LeaveCall
from pccl.protocol.errors import CollectiveAborted
from pccl.protocol.limits import REASON_BYTES_MAX
from tests.integration.conftest import Run
from tests.support.patience import LIMIT_S

FORGED = "enough\nCRITICAL pccl.master: the run is over\r\x1b[2J\u202egnihton" + 5000 * "x"


def test_a_reason_with_line_breaks_and_escapes_stays_one_short_line(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(3)
    session = run.members[2]._session  # pyright: ignore[reportPrivateUsage]
    engine, io = session.engine, session._io  # pyright: ignore[reportPrivateUsage]
    with caplog.at_level(logging.DEBUG, "pccl"):
        calls = [run.start(run.members[i].all_reduce, np.ones(9)) for i in (0, 2)]

        def leave() -> bool:
            posted = engine.machine.open_operations
            if not posted or posted[0].call is None:
                return False
            engine.feed(LeaveCall(posted[0].call, FORGED))
            return True

        while not io.call(leave):
            pass
        for call in calls[:1]:
            with pytest.raises(CollectiveAborted) as caught:
                call.result(LIMIT_S)
            assert " withdrew: enough\N{REPLACEMENT CHARACTER}CRITICAL" in caught.value.reason
            assert caught.value.reason.count("x") < REASON_BYTES_MAX
            assert str(caught.value).isprintable()
    for record in caplog.records:
        assert record.getMessage().isprintable()
