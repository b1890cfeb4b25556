"""docs/when-things-go-wrong.md shows what real processes print in each failure.

The page is the expectation. Each process that a line of the page names has printed that line, and
no process has printed a warning, an error or a line of its own that the page lacks. A number on the
page stands for any number, except in ``peer 2``, and ``...`` stands for any text.

The master and the proxies live in the test's process, the peers are processes of their own. This
file is also the peers' program, so it imports only what they need.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import pccl
from tests.support import members
from tests.support.patience import LIMIT_S, patient
from tests.support.peers import PeerProcess, obey
from tests.support.ports import free_port
from tests.support.processes import wait_stopped
from tests.support.waiting import until

NAMES = ("alice", "bob", "carol")
LARGE = 1 << 20
"""Values that take several segments."""

QUICK: dict[str, float] = {
    "heartbeat_s": 0.2, "tick_s": 0.05, "deadline_s": 600.0, "lane_stall_s": 600.0,
    "progress_s": 600.0, "waiting_report_s": 600.0, "recovery_s": patient(1.0),
}  # fmt: skip
"""Deadlines of all processes. Each situation shortens those that it is about."""


# -- the peers' program ----------------------------------------------------------------------------


class Program:
    """A peer. The test names its calls. What it prints goes to a file."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        sys.stderr = open(options.pop("log"), "a", buffering=1)  # noqa: SIM115
        timing = pccl.Timing(**options.pop("timing"))
        self.name = options["name"]
        self.comm = pccl.Communicator(address, timing=timing, **options)

    def do(self, call: str, arguments: dict[str, Any]) -> None:
        """Make a call, and print its error as the program of a user does."""
        try:
            getattr(self, call)(**arguments)
        except (pccl.PCCLError, OSError) as error:
            text = f"{self.name} caught {type(error).__name__}: {error}"
            print(text, file=sys.stderr)  # noqa: T201

    def start(self) -> None:
        """Show that the process is ready."""

    def connect(self) -> None:
        self.comm.connect(min_peers=len(NAMES))
        self.comm.update_topology()

    def grow(self) -> None:
        members.grow(self.comm, len(NAMES))

    def step(self, count: int = 1024) -> None:
        self.reduce(count)
        self.comm.update_topology()

    def reduce(self, count: int = 1024, dtype: str = "float32") -> None:
        self.comm.all_reduce(np.ones(count, dtype), retry=True)

    def update(self) -> None:
        self.comm.update_topology()

    def synchronize(self, revision: int = 5, count: int = LARGE, *, full: bool = False) -> None:
        values = np.full(count, revision, np.float32)
        state = pccl.SharedState([pccl.TensorInfo.from_numpy(values, "weights")])
        state.revision = revision
        no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patched = mock.patch("os.posix_fallocate", side_effect=no_room)
        with patched if full else contextlib.nullcontext():
            self.comm.sync_shared_state(state, staging_bytes_max=0)

    def finish(self) -> None:
        self.comm.close()
        logging.shutdown()  # its lines are in the file


# -- the test's side -------------------------------------------------------------------------------


class Scene:
    """A run whose processes write what they print into files of a folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.address = f"127.0.0.1:{free_port()}"
        self.timing = QUICK
        self.peers: dict[str, PeerProcess] = {}
        self.begun: dict[str, int] = dict.fromkeys((*NAMES, "master"), 0)
        """How much each process has printed before the situation."""
        self.master: pccl.MasterNode

    def begin(self, *proxied: str, **timing: float) -> list[ProxyThread]:
        """Start a run of three, which has made a step; return the proxies before some of them."""
        self.timing = QUICK | timing
        self.start_master()
        doors = [self.start_behind_proxy(name) for name in proxied]
        for name in NAMES:
            if name not in self.peers:
                self.start(name)
        self.do("start", *NAMES)
        for number, name in enumerate(NAMES, 1):  # in the order of their ids
            self.tell("connect", name)
            self.wait_for("master", f"peer {number} ({name}) of group 0 registered")
        self.answer(*NAMES)
        self.do("step", *NAMES)
        self.begun = {name: len(self.printed(name)) for name in self.begun}
        return doors

    def start_master(self) -> None:
        deadlines, state = pccl.Timing(**self.timing), self.folder / "state"
        self.master = pccl.MasterNode(self.address, timing=deadlines, state=state)
        self.stack.enter_context(self.master)

    def start(self, name: str, **options: Any) -> None:
        log = str(self.folder / name)
        given = json.dumps({"name": name, "log": log, "timing": self.timing, **options})
        self.peers[name] = PeerProcess(__name__, self.address, given)
        self.stack.callback(self.peers[name].end)

    def start_behind_proxy(self, name: str) -> ProxyThread:
        """Start a peer that others reach through a proxy, with a link for each of them."""
        port = free_port()
        door = ProxyThread(f"127.0.0.1:{port}", LinkSpec.parse(""), link_of=peer_of)
        self.stack.enter_context(door)
        self.start(name, advertise=str(door.address), listen=f"127.0.0.1:{port}")
        return door

    def tell(self, call: str, *names: str, **arguments: Any) -> None:
        for name in names:
            self.peers[name].tell("do", call, arguments)

    def answer(self, *names: str) -> None:
        for name in names:
            self.peers[name].answer()

    def do(self, call: str, *names: str, **arguments: Any) -> None:
        self.tell(call, *names, **arguments)
        self.answer(*names)

    def printed(self, name: str) -> str:
        return (self.folder / name).read_text()[self.begun[name] :]

    def wait_for(self, name: str, text: str) -> None:
        until(lambda: text in self.printed(name), pause_s=0.01)

    def wait_inside(self, count: int) -> None:
        """Until so many members are in a call."""

        def are_inside() -> bool:
            seen = pccl.master_status(self.address, timeout_s=LIMIT_S)
            return sum(bool(member.calls) for member in seen.members) == count

        until(are_inside, pause_s=0.01)

    def end(self) -> None:
        """Let all processes that live say goodbye and write their lines."""
        self.do("finish", *self.peers)
        self.master.interrupt()


class Line:
    """A line of the page, or one that a process has printed."""

    FORM = re.compile(r"(?:\S+ )?((INFO|WARNING|ERROR) pccl (\w+): .*)")

    def __init__(self, text: str) -> None:
        found = self.FORM.fullmatch(text)
        self.text, self.level, self.name = found.groups() if found else (text, "", text.split()[0])

    @property
    def pattern(self) -> re.Pattern[str]:
        """What the line of a page matches."""
        some = re.escape(self.text).replace(r"\.\.\.", ".*")
        number = r"\d+(?:\\\.\d+)*"
        return re.compile(
            re.sub(rf"(?<!(?<!this\\ )peer\\ )\b{number}", lambda _: r"\d+(?:\.\d+)*", some)
        )

    def is_among(self, lines: list[Line]) -> bool:
        """Whether one of the page's ``lines`` is this one."""
        return any(line.pattern.fullmatch(self.text) for line in lines)


def lines_of(text: str) -> list[Line]:
    """Lines that were printed, or the page's: ``alice, bob: x`` there is a line of each."""
    several = re.compile(r"((?:[A-Z]+ pccl )?)(\w+(?:, \w+)+)((?::| caught ).*)")
    lines: list[Line] = []
    for line in text.splitlines():
        found = several.fullmatch(line)
        names = found[2].split(", ") if found else [""]
        lines += (Line(f"{found[1]}{name}{found[3]}" if found else line) for name in names)
    return lines


if __name__ == "__main__":
    obey(Program(sys.argv[1], json.loads(sys.argv[2])))
else:
    import pytest

    from pccl.observe.logs import LineFormatter
    from pccl.stress.emulator import LinkSpec, ProxyThread, peer_of
    from tests.support.paths import ROOT

    PAGE = (ROOT / "docs" / "when-things-go-wrong.md").read_text(encoding="utf-8")
    SECTIONS = dict(re.findall(r"^## (.*?)\n.*?```\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
    """Lines of each section."""

    def kill(scene: Scene) -> None:
        scene.begin()
        scene.tell("step", "alice", "carol")
        scene.wait_inside(2)
        scene.peers.pop("bob").end()
        scene.answer("alice", "carol")
        scene.start("bob")
        scene.tell("connect", "bob")
        scene.wait_for("master", "peer 4 (bob) of group 0 registered")
        scene.do("grow", "alice", "carol")
        scene.answer("bob")

    def stop(scene: Scene) -> None:
        scene.begin(deadline_s=patient(2.0), waiting_report_s=patient(0.5))
        bob = scene.peers["bob"].process
        bob.send_signal(signal.SIGSTOP)
        wait_stopped(bob.pid)
        scene.do("step", "alice", "carol")
        bob.send_signal(signal.SIGCONT)
        scene.do("step", "bob")
        scene.tell("update", "bob")
        scene.wait_for("master", "peer 4 (bob) of group 0 registered")
        scene.do("grow", "alice", "carol")
        scene.answer("bob")

    def reset(scene: Scene) -> None:
        (door,) = scene.begin("alice")
        door.reset(link=2)
        for name in ("alice", "bob"):
            scene.wait_for(name, "works again")

    def dead_link(scene: Scene) -> None:
        limits = dict.fromkeys(("lane_stall_s", "dial_s"), patient(0.7))
        doors = scene.begin("alice", "bob", resume_s=patient(2.0), **limits)
        links = list(zip(doors, (2, 1), strict=True))
        for door, dialler in links:
            door.stall(link=dialler)
        scene.do("step", *NAMES, count=LARGE)
        for name in ("alice", "bob"):
            scene.wait_for(name, "works again")

    def master_back(scene: Scene) -> None:
        scene.begin()
        scene.master.interrupt()
        scene.tell("step", *NAMES)
        for name in NAMES:
            scene.wait_for(name, "lost the master")
        scene.start_master()
        scene.answer(*NAMES)

    def master_gone(scene: Scene) -> None:
        scene.begin(master_lost_s=patient(2.5))  # the loss is told after 0.5 s
        scene.master.interrupt()
        scene.do("step", *NAMES)

    def full_disk(scene: Scene) -> None:
        scene.begin()
        scene.tell("synchronize", "alice", "bob")
        scene.do("synchronize", "carol", revision=4, full=True)
        scene.do("synchronize", "carol", revision=4)
        scene.answer("alice", "bob")

    def wrong_model(scene: Scene) -> None:
        scene.begin()
        scene.tell("synchronize", "alice", "bob", count=1000)
        scene.do("synchronize", "carol", count=999)
        scene.answer("alice", "bob")

    def wrong_type(scene: Scene) -> None:
        scene.begin()
        scene.tell("reduce", "alice", "bob")
        scene.do("reduce", "carol", dtype="float64")
        scene.answer("alice", "bob")

    def slow_peer(scene: Scene) -> None:
        scene.begin(waiting_report_s=patient(0.5))
        scene.tell("reduce", "alice", "carol")
        for name in ("alice", "carol"):
            scene.wait_for(name, "has waited")
        scene.do("reduce", "bob")
        scene.answer("alice", "carol")

    SITUATIONS: dict[str, Callable[[Scene], None]] = {
        "A peer is killed": kill,
        "A peer stops": stop,
        "A peer is slow": slow_peer,
        "A link breaks": reset,
        "A link stays dead": dead_link,
        "The master is killed and comes back": master_back,
        "The master is gone for good": master_gone,
        "A disk is full": full_disk,
        "A peer has another model": wrong_model,
        "A peer passes other arguments": wrong_type,
    }

    @pytest.fixture
    def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
        monkeypatch.setenv("PCCL_LOG", "info")
        monkeypatch.setenv("PCCL_LOCAL", "tcp")
        log, handler = logging.getLogger("pccl"), logging.FileHandler(tmp_path / "master")
        handler.setFormatter(LineFormatter("master", local=False))
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        with contextlib.ExitStack() as stack:
            yield Scene(tmp_path, stack)
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()

    def test_each_section_has_its_situation() -> None:
        assert list(SECTIONS) == list(SITUATIONS)

    @pytest.mark.parametrize("title", SITUATIONS)
    def test_the_page_shows_what_is_printed(scene: Scene, title: str) -> None:
        SITUATIONS[title](scene)
        scene.end()
        said = lines_of(SECTIONS.get(title, ""))
        printed = {name: lines_of(scene.printed(name)) for name in (*NAMES, "master")}
        for name, lines in printed.items():
            print("\n".join(line.text for line in lines))  # noqa: T201
            told = [line for line in said if line.name == name]
            lacks = [
                line.text for line in lines if line.level != "INFO" and not line.is_among(told)
            ]
            assert not lacks, f"the page lacks lines of {name}"
        for line in said:
            texts = [one.text for one in printed[line.name]]
            assert any(map(line.pattern.fullmatch, texts)), f"not printed: {line.text}"
