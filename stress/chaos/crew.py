"""The processes of a run: started, heard, frozen, killed. None is left when the block ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pccl import config
from pccl.cli.processes.children import STDOUT, Children, Ended, OutputLine
from pccl.cli.processes.reports import decode
from pccl.stress.chaos.events import KINDS, Event
from pccl.stress.chaos.namespaces import Hosts
from pccl.stress.chaos.network import Network
from pccl.stress.chaos.peer_process import DUMP_SIGNAL
from pccl.stress.chaos.settings import Settings
from pccl.stress.chaos.verdict.record import Life, RunRecord
from pccl.stress.timeline import MASTER, STANDBY

OURS = frozenset(
    value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)
)
"""Variables about a run that is not this one."""

PORT_FIRST, PORT_LAST = 20_000, 32_000
"""Below those that the system gives to whoever dials, so that a door stays free while its process
is dead."""


class ChaosCrew:
    """The processes of a run; leaving the ``with`` block ends them all.

    Args:
        settings: the run.
        record: of the lives.
        network: between them.
        hosts: where they run.
    """

    def __init__(
        self, settings: Settings, record: RunRecord, network: Network, hosts: Hosts
    ) -> None:
        self._settings = settings
        self._record = record
        self._network = network
        self._hosts = hosts
        self._children = Children[Life]()
        self._doors: dict[int, tuple[str, ...]] = {}
        """Index -> where it listens, what the others dial, where it dials each master."""
        self._living: dict[int, Life] = {}
        self._stops: dict[int, set[object]] = {}
        """Why a process is stopped at the moment."""
        self._port = PORT_FIRST + settings.timeline.seed * 131 % (PORT_LAST - PORT_FIRST - 4000)
        self._port += os.getpid() % 3000
        self._masters: list[str] = []
        self._in_charge = 0
        """Which of the masters' addresses is that of the one in charge."""

    def __enter__(self) -> Self:
        self._children.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        for life in self._living.values():  # only if the block ends before the run
            life.killed = True
        self._children.close()

    # -- starting --------------------------------------------------------------------------------

    def door(self, index: int) -> str:
        """Where a process listens; it must have been started once."""
        return self._masters[self._in_charge] if index == MASTER else self._doors[index][0]

    def start_masters(self) -> list[Life]:
        """Start the master, and a standby if one is to take over."""
        count = 2 if self._settings.timeline.has_standby else 1
        self._masters = [self._door(self._hosts.host(MASTER)) for _ in range(count)]
        lives = [self._start_master(MASTER, 0)]
        return [*lives, self._start_master(STANDBY, 1)] if count > 1 else lives

    def restart_master(self, *, blank: bool) -> Life:
        """Start the next master on the address of the one that was in charge.

        Args:
            blank: what that one has written down is lost.
        """
        if blank:
            shutil.rmtree(self._state(self._in_charge), ignore_errors=True)
        return self._start_master(MASTER, self._in_charge)

    def promote(self) -> bool:
        """Let the standby be the one in charge; False: there is none (any more)."""
        life = self._living.pop(STANDBY, None)
        if life is None:
            return False
        life.index = MASTER
        self._living[MASTER] = life
        self._stops[MASTER] = set()
        self._in_charge = 1
        return True

    def _start_master(self, index: int, which: int) -> Life:
        timeline = self._settings.timeline
        arguments = ["--listen", self._masters[which], "--deadline", str(timeline.deadline_s)]
        arguments += ["--state", str(self._state(which))]
        if len(self._masters) > 1:
            other = self._masters[1 - which]
            arguments += ["--standby-of" if which else "--standby", other]
        return self._start(index, "master_process", arguments)

    def _state(self, which: int) -> Path:
        return self._settings.folder / f"master{which}"

    def start_peer(self, index: int) -> Life:
        """Start a peer, or the next one in its place."""
        timeline = self._settings.timeline
        if index not in self._doors:
            host = self._hosts.host(index)
            door = self._door(host)
            relays = self._network.add(index, self._hosts.relay_host, door, self._masters)
            self._doors[index] = (door, *relays)
        door, front, *masters = self._doors[index]
        arguments = [
            *("--master", ",".join(masters), "--listen", door, "--advertise", front),
            *("--seed", str(timeline.seed), "--lanes", str(timeline.lanes)),
            *("--group", str(self._record.group_of(index))),
            *("--deadline", str(timeline.deadline_s), "--stop", str(self._settings.stop)),
        ]
        if index == 0 and self._settings.plant is not None:
            arguments += ["--plant", str(self._settings.plant)]
        return self._start(index, "peer_process", arguments)

    def _start(self, index: int, module: str, arguments: Sequence[str]) -> Life:
        assert index not in self._living
        environment = {key: value for key, value in os.environ.items() if key not in OURS}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        program = [sys.executable, "-m", f"pccl.stress.chaos.{module}", *arguments]
        prefix = self._hosts.prefix(index)
        command = [*prefix, *program] if prefix else program
        began_s = time.monotonic()
        life = Life(index, 0, began_s, progress_s=began_s)
        life.pid = self._children.start(life, [command[0], *command], environment)
        self._living[index] = life
        self._stops[index] = set()
        self._record.lives.append(life)
        return life

    def _door(self, host: str) -> str:
        port = self._network.free_port(self._hosts.test_host(host), self._port, PORT_LAST)
        self._port = port + 1
        return f"{host}:{port}"

    # -- hearing ---------------------------------------------------------------------------------

    def living(self, index: int) -> Life | None:
        """The process of an index, if it runs."""
        return self._living.get(index)

    def all_living(self) -> list[Life]:
        """All that run, the master too."""
        return list(self._living.values())

    def hear(self, timeout_s: float) -> list[tuple[Life, Event | Ended]]:
        """What they tell, and their ends; what is no event is kept with the life."""
        found: list[tuple[Life, Event | Ended]] = []
        for life, what in self._children.hear(timeout_s):
            if isinstance(what, OutputLine):
                text = what.text.decode(errors="replace")
                event = decode(text, KINDS) if what.stream == STDOUT else None
                if event is None:
                    life.said.append(text)
                else:
                    found.append((life, event))
                continue
            life.ended_s, life.exit_code = time.monotonic(), what.exit_code
            if self._living.get(life.index) is life:
                del self._living[life.index]
            found.append((life, what))
        return found

    # -- what is done to them --------------------------------------------------------------------

    def kill(self, index: int) -> bool:
        """SIGKILL; False: it does not run. Its place is free at once."""
        life = self._living.pop(index, None)
        if life is None:
            return False
        life.killed = True
        self._children.send(signal.SIGKILL, life.pid)
        return True

    def tell_to_leave(self, index: int) -> bool:
        """SIGTERM; False: it does not run, or is not so far that it knows what to do then."""
        life = self._living.get(index)
        if life is None or not life.ready:
            return False
        life.told_to_leave = True
        self._children.send(signal.SIGTERM, life.pid)
        return True

    def stop(self, life: Life, why: object) -> None:
        """SIGSTOP, until nobody has a reason any more."""
        if self._living.get(life.index) is life:
            self._stops[life.index].add(why)
            self._children.send(signal.SIGSTOP, life.pid)

    def go_on(self, life: Life, why: object) -> None:
        """This reason is gone."""
        if self._living.get(life.index) is life:
            reasons = self._stops[life.index]
            reasons.discard(why)
            if not reasons:
                self._children.send(signal.SIGCONT, life.pid)

    def dump(self, life: Life) -> None:
        """Let it write to stderr where each of its threads stands."""
        self._children.send(DUMP_SIGNAL, life.pid)
