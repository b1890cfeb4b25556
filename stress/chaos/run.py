"""``ChaosRun``: a whole run: start, faults, calm, end. However it ends, no process is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pccl.cli.processes.children import Ended
from pccl.stress.chaos.crew import ChaosCrew
from pccl.stress.chaos.events import Event, PeerJoined
from pccl.stress.chaos.namespaces import Loopback, Namespaces
from pccl.stress.chaos.network import Network
from pccl.stress.chaos.settings import Settings, patience_s
from pccl.stress.chaos.trouble import Trouble
from pccl.stress.chaos.verdict.record import Life, RunRecord
from pccl.stress.chaos.view import ChaosView
from pccl.stress.emulator.spec import LinkSpec

REFRESH_S = 0.1
"""Time between two updates of the view, and two checks for hangs."""

START_S = 120.0
"""Time limit for all processes to start and join; imports are slow on few cores."""

DUMP_S = 1.0
"""Time that a hanging process has to write its stacks, before the harness kills it."""


class StartFailed(Exception):
    """The run did not begin; the message says which process failed, and how."""


class ChaosRun:
    """One run, from the start of its processes to their end.

    Args:
        settings: settings of the run.
        view: displays the events of the run.
        listen: called with each event of a process, and the process; None: nobody.

    Attributes:
        record: events received so far; complete once ``run`` has returned or raised.
    """

    def __init__(
        self,
        settings: Settings,
        view: ChaosView,
        listen: Callable[[Life, Any], None] | None = None,
    ) -> None:
        self._listen = listen
        self.record = RunRecord(settings.timeline)
        self._settings = settings
        self._view = view
        self._patience_s = patience_s(settings.timeline) + settings.slack_s
        self._dumped: dict[int, float] = {}

    def run(self) -> None:
        """Start the processes, carry out the timeline, and return when all processes have ended.

        Raises:
            StartFailed: the run did not begin.
            NamespacesRefused: the system does not allow ``--netns``.
            KeyboardInterrupt: Ctrl-C; all processes have ended.
        """
        timeline = self._settings.timeline
        try:
            with (
                self._hosts() as hosts,
                Network(self._link(), timeline.seed) as network,
                ChaosCrew(self._settings, self.record, network, hosts) as crew,
            ):
                self._network, self._crew = network, crew
                self._trouble = trouble = Trouble(crew, network, self.record, self._note)
                self._start()
                trouble.plan(self.record.began_s)
                self._listen_until(self.record.began_s + timeline.duration_s, trouble)
                trouble.lift()
                self._calm()
                self._end()
        finally:
            self.record.finish(time.monotonic())

    # -- phases ----------------------------------------------------------------------------------

    def _start(self) -> None:
        end_s = time.monotonic() + START_S
        masters = self._crew.start_masters()
        while not all(master.ready for master in masters):
            self._start_step(end_s)
        for index in range(self._settings.timeline.peers):
            self._crew.start_peer(index)
        while not all(life.first_result_s for life in self._expected()):
            self._start_step(end_s)
        self.record.began_s = time.monotonic()
        self._note(f"{self._settings.timeline.peers} peers reduce together")

    def _expected(self) -> list[Life]:
        """Return the peers that must have a result before the first fault; a lone peer need not."""
        timeline = self._settings.timeline
        alone = [g for g in range(timeline.groups) if timeline.peers - g <= timeline.groups]
        lives = [life for life in self._crew.all_living() if life.index >= 0]
        return [life for life in lives if self.record.group_of(life.index) not in alone]

    def _start_step(self, end_s: float) -> None:
        self._hear(REFRESH_S)
        ended = next(iter(self.record.ended_lives()), None)
        if ended is not None:
            said = "\n".join(ended.said)
            raise StartFailed(f"{ended.label} ended early with exit code {ended.exit_code}\n{said}")
        if time.monotonic() > end_s:
            raise StartFailed(f"not all peers joined within {START_S:.0f} s; try fewer --peers")

    def _listen_until(self, end_s: float, trouble: Trouble) -> None:
        while (now := time.monotonic()) < end_s:
            trouble.act()
            next_s = trouble.next_s()
            self._hear(max(0.0, min(REFRESH_S, end_s - now, (next_s or end_s) - now)))
            self._find_hangs()

    def _calm(self) -> None:
        """Wait after all faults until every living peer has a result with its group."""
        since_s = time.monotonic()
        self._note("all faults are over")
        while waiting := self.record.without_result(self._crew.all_living(), since_s):
            self._hear(REFRESH_S)
            self._find_hangs()
            if time.monotonic() > since_s + self._patience_s:
                for life in waiting:
                    self._hang(life, "had no result after all faults were over")

    def _end(self) -> None:
        self.record.ended_s = time.monotonic()
        self._settings.stop.touch()
        end_s = time.monotonic() + self._patience_s
        while self._peers():
            self._hear(REFRESH_S)
            self._find_hangs()
            if time.monotonic() > end_s:
                for life in self._peers():
                    self._hang(life, "did not end")
        while masters := self._crew.all_living():
            for master in masters:
                if not master.told_to_leave:
                    self._crew.tell_to_leave(master.index)
                if time.monotonic() > end_s:
                    self._hang(master, "did not end")
            self._hear(REFRESH_S)
            self._find_hangs()

    # -- listening -------------------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        for life, what in self._crew.hear(timeout_s):
            self._on(life, what)
        self._view.update(self.record, time.monotonic())

    def _on(self, life: Life, what: Event | Ended) -> None:
        if isinstance(what, Ended):
            self._trouble.ended(life)
            if not life.killed and what.exit_code != 0:
                self._note(f"CRASH: {life.label} (pid {life.pid}): {what}")
            return
        if self._listen is not None:
            self._listen(life, what)
        known = self.record.newest(life.index)
        words = self.record.add(life, what)
        if isinstance(what, PeerJoined) and known is life:
            self._network.joined(life.index, what.peer)
        if words is not None:
            self._note(words)

    def _find_hangs(self) -> None:
        now = time.monotonic()
        for life in self._crew.all_living():
            if life.hung:
                if now > self._dumped[life.pid] + DUMP_S:
                    self._crew.kill(life.index)
                continue
            quiet_s = self.record.quiet_s(life, now)
            if quiet_s > self._patience_s:
                self._hang(life, f"made no progress for {quiet_s:.0f} s")

    def _hang(self, life: Life, words: str) -> None:
        if life.hung:
            return
        life.hung = True
        self._dumped[life.pid] = time.monotonic()
        self._crew.dump(life)
        self._note(f"HANG: {life.label} (pid {life.pid}) {words}")
        self.record.hangs.add(f"{life.label} (pid {life.pid}) {words}")

    # -- small things ----------------------------------------------------------------------------

    def _peers(self) -> list[Life]:
        return [life for life in self._crew.all_living() if life.index >= 0]

    def _note(self, text: str) -> None:
        began_s = self.record.began_s
        self._view.note(time.monotonic() - began_s if began_s else 0.0, text)

    def _link(self) -> LinkSpec:
        """Return the properties of the proxies; in namespaces the kernel limits the rate."""
        spec = self._settings.timeline.link_spec
        return replace(spec, rate_bps=None) if self._settings.netns else spec

    def _hosts(self) -> Loopback | Namespaces:
        if self._settings.netns:
            return Namespaces(self._settings.timeline.link_spec.rate_bps)
        return Loopback()
