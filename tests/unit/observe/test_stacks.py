"""Where the threads of a process are."""

from __future__ import annotations

import threading

from pccl.observe.stacks import FRAMES_MAX, stacks
from tests.support.waiting import wait_for_threads


class Waiting(threading.Thread):
    """Waits at a depth of calls."""

    def __init__(self, depth: int) -> None:
        super().__init__(name=f"deep-{depth}", daemon=True)
        self.depth, self.goal, self.inside = depth, threading.Event(), threading.Event()

    def run(self) -> None:
        self.descend(self.depth)

    def descend(self, left: int) -> None:
        if left:
            self.descend(left - 1)
        else:
            self.inside.set()
            self.goal.wait()


def test_all_threads_are_shown_with_their_innermost_frames_last() -> None:
    threads = [Waiting(depth) for depth in (0, 100)]
    for thread in threads:
        thread.start()
        thread.inside.wait()
    found = {one["thread"]: one for one in stacks()}
    for thread in threads:
        thread.goal.set()
    wait_for_threads(Waiting)
    (main,) = (one for one in found.values() if one["is_main"])
    assert any("in test_all_threads_are_shown" in frame for frame in main["frames"])
    shallow, deep = found["deep-0"]["frames"], found["deep-100"]["frames"]
    assert len(shallow) < len(deep) == FRAMES_MAX
    assert "in wait: " in shallow[-1]
    assert any(frame.endswith("in run: self.descend(self.depth)") for frame in shallow)
    assert not any(" in run: " in frame for frame in deep)
