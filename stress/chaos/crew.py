"""``ChaosCrew``: starts, reads, stops and kills the processes of a run."""

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
    value
    for name, value in vars(config).items()
    if name.isupper() and isinstance(value, str) and value != config.ENCRYPT
)
"""Environment variables of ``pccl`` that may describe another run."""

PORT_FIRST, PORT_LAST = 20_000, 32_000
"""Ports below those that the system gives to dialling sockets, so that a port stays free while its
process is dead."""


class ChaosCrew:
    """The processes of a run; leaving the ``with`` block ends them all.

    Args:
        settings: settings of the run.
        record: gets each process that starts.
        network: the proxies between the processes.
        hosts: where the processes run.
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
        """Index -> own address, address that other peers dial, addresses of the masters."""
        self._living: dict[int, Life] = {}
        self._stops: dict[int, set[object]] = {}
        """Index -> reasons for which the process is stopped now."""
        self._port = PORT_FIRST + settings.timeline.seed * 131 % (PORT_LAST - PORT_FIRST - 4000)
        self._port += os.getpid() * 61 % 3000  # two runs that start together are far apart
        self._masters: list[str] = []
        self._in_charge = 0
        """Index of the master in charge in ``_masters``."""

    def __enter__(self) -> Self:
        self._children.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        for life in self._living.values():  # only if the block ends before the run
            life.killed = True
        self._children.close()

    # -- starting --------------------------------------------------------------------------------

    def door(self, index: int) -> str:
        """Return the address at which a process listens; it must have started before."""
        return self._masters[self._in_charge] if index == MASTER else self._doors[index][0]

    def start_masters(self) -> list[Life]:
        """Start the master, and a standby if the timeline needs one."""
        count = 2 if self._settings.timeline.has_standby else 1
        self._masters = [self._door(self._hosts.host(MASTER)) for _ in range(count)]
        lives = [self._start_master(MASTER, 0)]
        return [*lives, self._start_master(STANDBY, 1)] if count > 1 else lives

    def restart_master(self, *, blank: bool) -> Life:
        """Start a new master at the address of the last master in charge.

        Args:
            blank: whether to delete the state that it stored.
        """
        if blank:
            shutil.rmtree(self._state(self._in_charge), ignore_errors=True)
        return self._start_master(MASTER, self._in_charge)

    def promote(self) -> bool:
        """Put the standby in charge; return False if no standby runs."""
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
        return self._start(index, "pccl.stress.chaos.master_process", arguments)

    def _state(self, which: int) -> Path:
        return self._settings.folder / f"master{which}"

    def start_peer(self, index: int) -> Life:
        """Start a peer, or a new process in its place."""
        timeline = self._settings.timeline
        if index not in self._doors:
            host = self._hosts.host(index)
            door = self._door(host)
            proxies = self._network.add(index, self._hosts.proxy_host, door, self._masters)
            self._doors[index] = (door, *proxies)
        door, front, *masters = self._doors[index]
        if timeline.local:
            front = door
        arguments = [
            *("--master", ",".join(masters), "--listen", door, "--advertise", front),
            *("--seed", str(timeline.seed), "--lanes", str(timeline.lanes)),
            *("--group", str(self._record.group_of(index))),
            *("--deadline", str(timeline.deadline_s), "--stop", str(self._settings.stop)),
            *("--nap", str(self._settings.nap(index))),
            *(one.format(index=index) for one in self._settings.arguments),
        ]
        if index == 0 and self._settings.plant is not None:
            arguments += ["--plant", str(self._settings.plant)]
        return self._start(index, self._settings.program, arguments)

    def _start(self, index: int, module: str, arguments: Sequence[str]) -> Life:
        assert index not in self._living
        environment = {key: value for key, value in os.environ.items() if key not in OURS}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        program = [sys.executable, "-m", module, *arguments]
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
        """Return the running process of an index; None: no such process runs."""
        return self._living.get(index)

    def all_living(self) -> list[Life]:
        """Return all running processes, including the masters."""
        return list(self._living.values())

    def hear(self, timeout_s: float) -> list[tuple[Life, Event | Ended]]:
        """Return events and ends of the processes; keep their other output in ``Life.said``."""
        kinds = (*KINDS, *self._settings.kinds)
        found: list[tuple[Life, Event | Ended]] = []
        for life, what in self._children.hear(timeout_s):
            if isinstance(what, OutputLine):
                text = what.text.decode(errors="replace")
                event = decode(text, kinds) if what.stream == STDOUT else None
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
        """Send SIGKILL, and free the index at once; return False if the process does not run."""
        life = self._living.pop(index, None)
        if life is None:
            return False
        life.killed = True
        self._children.send(signal.SIGKILL, life.pid)
        return True

    def tell_to_leave(self, index: int) -> bool:
        """Send SIGTERM; return False if the process does not run, or cannot handle SIGTERM yet."""
        life = self._living.get(index)
        if life is None or not life.ready:
            return False
        life.told_to_leave = True
        self._children.send(signal.SIGTERM, life.pid)
        return True

    def stop(self, life: Life, why: object) -> None:
        """Stop a process with SIGSTOP, until ``go_on`` has removed all reasons."""
        if self._living.get(life.index) is life:
            self._stops[life.index].add(why)
            self._children.send(signal.SIGSTOP, life.pid)

    def go_on(self, life: Life, why: object) -> None:
        """Remove a reason to stop; without further reasons, send SIGCONT."""
        if self._living.get(life.index) is life:
            reasons = self._stops[life.index]
            reasons.discard(why)
            if not reasons:
                self._children.send(signal.SIGCONT, life.pid)

    def let_nap(self, index: int) -> None:
        """Let the program of a peer make no calls until ``wake``."""
        self._settings.nap(index).touch()

    def wake(self, index: int) -> None:
        """End the nap of a peer."""
        self._settings.nap(index).unlink(missing_ok=True)

    def dump(self, life: Life) -> None:
        """Make the process write the stacks of its threads to stderr."""
        self._children.send(DUMP_SIGNAL, life.pid)
