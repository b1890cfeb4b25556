"""Network namespaces: refused in clear words where they cannot be."""

import os
import shutil
import subprocess

import pytest

from pccl.stress.chaos import namespaces
from pccl.stress.chaos.namespaces import PROCESSES_MAX, Namespaces, NamespacesRefused


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system with both programs, and without namespaces of old runs."""

    def find(program: str) -> str:
        return program

    def listing(*command: object, **how: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess((), 0, stdout=b"")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_find", find)
    monkeypatch.setattr(subprocess, "run", listing)


def test_it_takes_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NamespacesRefused, match="needs root"), Namespaces(None):
        pass


def test_it_takes_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, path: str | None = None) -> str | None:
        return None

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", nothing)
    with pytest.raises(NamespacesRefused, match="needs the program ip"), Namespaces(None):
        pass


@pytest.mark.usefixtures("as_root")
def test_what_the_system_refuses_is_passed_on_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: list[str], *, check: bool = True) -> None:
        ran.append(tuple(command))
        if check and "netns" in command:
            raise NamespacesRefused("--netns is not possible here: Operation not permitted")

    monkeypatch.setattr(namespaces, "_run", run)
    with pytest.raises(NamespacesRefused, match="not permitted"), Namespaces(None):
        pass
    bridge = f"pccl{os.getpid()}"
    assert ran[0] == ("ip", "link", "add", bridge, "type", "bridge")
    assert ran[-1] == ("ip", "link", "del", bridge)
    assert ("ip", "netns", "del", f"{bridge}-0") in ran


@pytest.mark.usefixtures("as_root")
def test_the_limit_of_processes_is_the_one_that_the_error_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], *, check: bool = True) -> None:
        pass

    monkeypatch.setattr(namespaces, "_run", run)
    with Namespaces(None) as hosts:  # the master has the first one
        found = {hosts.host(index) for index in range(PROCESSES_MAX - 1)}
        assert len(found) == PROCESSES_MAX - 1
        with pytest.raises(NamespacesRefused, match=f"room for {PROCESSES_MAX} processes"):
            hosts.host(PROCESSES_MAX)
