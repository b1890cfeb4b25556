"""How findings are printed."""

from __future__ import annotations

import json

import pytest

from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.findings_view import FindingsView

GOOD = Finding("token", Severity.OK, "43 bytes")
BAD = Finding("reach in", Severity.FAIL, "no answer from [bold]x", "open a port")


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = FindingsView(as_json=False)
    view.show([GOOD])
    assert capsys.readouterr().out == "ok    token: 43 bytes\n"  # at once
    assert not view.has_failed
    view.show([BAD])
    view.close()
    said = "fail  reach in: no answer from [bold]x; remedy: open a port\n"
    assert capsys.readouterr().out == said
    assert view.has_failed


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    view = FindingsView(as_json=True)
    view.show([GOOD, BAD])
    assert capsys.readouterr().out == ""
    view.close()
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1
    assert told["findings"][1] == {
        "name": "reach in",
        "level": "fail",
        "found": "no answer from [bold]x",
        "remedy": "open a port",
    }


def test_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    view = FindingsView(as_json=False)
    view.show([GOOD, BAD])
    view.close()
    shown = capsys.readouterr().out
    assert "\x1b[32mok" in shown
    assert "no answer from [bold]x" in shown  # texts of others steer nothing
    assert "→ open a port" in shown
