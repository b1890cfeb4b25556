"""Network namespaces: refused in clear words where they cannot be."""

import os
import shutil
import subprocess

import pytest

from pccl.stress.chaos import namespaces
from pccl.stress.chaos.namespaces import Namespaces, NamespacesRefused


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


def test_what_the_system_refuses_is_passed_on_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: list[str], *, check: bool = True) -> None:
        ran.append(tuple(command))
        if check and "netns" in command:
            raise NamespacesRefused("--netns is not possible here: Operation not permitted")

    def find(program: str) -> str:
        return program

    def listing(*command: object, **how: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess((), 0, stdout=b"")  # no namespaces of old runs

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_find", find)
    monkeypatch.setattr(namespaces, "_run", run)
    monkeypatch.setattr(subprocess, "run", listing)
    with pytest.raises(NamespacesRefused, match="not permitted"), Namespaces(None):
        pass
    bridge = f"pccl{os.getpid()}"
    assert ran[0] == ("ip", "link", "add", bridge, "type", "bridge")
    assert ran[-1] == ("ip", "link", "del", bridge)
    assert ("ip", "netns", "del", f"{bridge}-0") in ran
