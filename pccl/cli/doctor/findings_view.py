"""Prints findings: coloured on a terminal, plain lines or one JSON object elsewhere."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any

import click

from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.streams import writing

JSON_VERSION = 1

STYLES = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


class FindingsView:
    """Prints findings as they come; with JSON, all of them at the end.

    Args:
        as_json: whether to print one JSON object.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: list[Finding] = []
        self._console: Any = None
        if sys.stdout.isatty() and not as_json:
            # Imported here, so that a piped command does not load rich.
            from rich.console import Console

            self._console = Console()

    @property
    def has_failed(self) -> bool:
        """Whether a finding is a failure."""
        return any(finding.level is Severity.FAIL for finding in self._shown)

    def show(self, findings: Iterable[Finding]) -> None:
        """Print findings."""
        for finding in findings:
            self._shown.append(finding)
            with writing():
                if self._console is not None:
                    self._show_coloured(finding)
                elif not self._as_json:
                    click.echo(line(finding))

    def close(self) -> None:
        """Print what is left to print."""
        if self._as_json:
            findings = [dataclasses.asdict(finding) for finding in self._shown]
            with writing():
                click.echo(json.dumps({"version": JSON_VERSION, "findings": findings}))

    def _show_coloured(self, finding: Finding) -> None:
        from rich.padding import Padding
        from rich.text import Text

        style = STYLES[finding.level]
        head = Text.assemble((f"{finding.level:<4}  ", style), (finding.name, "bold"), ": ")
        self._console.print(head.append(finding.found))
        if finding.remedy:
            self._console.print(Padding(Text(f"→ {finding.remedy}", style), (0, 0, 0, 6)))


def line(finding: Finding) -> str:
    """Return a finding as one plain line."""
    remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:<4}  {finding.name}: {finding.found}{remedy}"
