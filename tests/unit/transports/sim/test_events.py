"""Events of the network: each gets the first free instant."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.sim.events import Event, Events


@given(
    st.lists(
        st.tuples(st.sampled_from(["at", "at", "at", "cancel", "pass"]), st.integers(0, 30)),
        max_size=80,
    )
)
def test_an_event_gets_the_first_free_instant(steps: list[tuple[str, int]]) -> None:
    loop = VirtualLoop(limit_ns=1 << 40)
    events = Events(loop, Random(0), None, ragged=False)
    due: dict[int, Event] = {}
    happened = [-1]

    def happen() -> None:
        happened.append(loop.now_ns())
        del due[loop.now_ns()]

    async def passes(duration_ns: int) -> None:
        woken = loop.create_future()
        loop.call_at_ns(loop.now_ns() + duration_ns, woken.set_result, None)
        await woken

    for what, number in steps:
        match what:
            case "at":
                when_ns = free_ns = max(loop.now_ns(), loop.now_ns() + number - 10)
                event = events.at(when_ns, happen)
                while free_ns in due or free_ns in happened:
                    free_ns += 1
                assert event[1] == free_ns
                due[free_ns] = event
            case "cancel":
                if due:
                    events.cancel(due.pop(sorted(due)[number % len(due)]))
            case _:
                loop.run_until_complete(passes(number))
    loop.close()
