"""``pccl doctor``: checks this machine and its path to a run."""

from __future__ import annotations

import os

import click

from pccl import config
from pccl.cli.command_line import check_switches, master_options, read_secret, timeout_option
from pccl.cli.doctor import checks
from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.facts import PathFacts, TokenFacts
from pccl.cli.doctor.findings_view import FindingsView
from pccl.cli.doctor.gather import (
    address_facts,
    machine_facts,
    path_facts,
    router_facts,
    run_facts,
)
from pccl.cli.doctor.path_checks import path_findings
from pccl.cli.doctor.run_checks import run_findings
from pccl.cli.runs.target import NoRun, Target, find_target

NO_MASTER = Finding(
    "run",
    Severity.OK,
    "not examined: with the address of a master, HOST:PORT, the doctor also checks the path to it, "
    "the token, the clock, NAT, and whether the master can reach this machine",
)


@click.command()
@master_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@timeout_option()
@click.pass_context
def doctor(
    ctx: click.Context, master: str | None, token: str | None, as_json: bool, timeout_s: float
) -> None:
    """Check this machine, and its path to the run of the master at HOST:PORT.

    The default is PCCL_MASTER, or else the run of this user's master on this machine.
    Without a run, the doctor checks the machine only. It does not join the run. The master dials a
    port of this machine for a moment, as it dials newcomers; PCCL_LISTEN and PCCL_ADVERTISE count.

    Each line is ok, warn or fail, with what to do. The exit code is 1 if a line is fail.
    """
    check_switches()
    view = FindingsView(as_json=as_json)
    try:
        _examine(view, master, token, timeout_s)
    except KeyboardInterrupt:
        raise click.Abort from None
    view.close()
    ctx.exit(1 if view.has_failed else 0)


def _examine(view: FindingsView, master: str | None, token: str | None, timeout_s: float) -> None:
    secret, flaw = _token(token)
    target = _target(master, token, flaw)
    machine = machine_facts()
    view.show(checks.machine_findings(machine))
    own = list(address_facts(timeout_s))
    view.show(map(checks.address_finding, own))
    if target is None:
        view.show([checks.outward_finding(machine)])
        if machine.outward and not any(address.flaw for address in own):
            view.show([checks.router_finding(router_facts())])
        known = TokenFacts(None if secret is None else len(secret), flaw)
        view.show([checks.token_finding(known, ""), NO_MASTER])
        return
    paths: list[PathFacts] = []
    for address in config.resolve_masters(target.masters):
        paths.append(path_facts(str(address), timeout_s))
        view.show(path_findings(paths[-1]))
    good = next((path for path in paths if path.address), None)
    known = TokenFacts(None if target.token is None else len(target.token), flaw)
    view.show([checks.token_finding(known, "" if good is None else good.host)])
    if good is not None and not flaw and not any(address.flaw for address in own):
        view.show(run_findings(run_facts(good, target.token, timeout_s)))


def _token(file: str | None) -> tuple[bytes | None, str]:
    """Return the secret of the arguments or the environment, and why it is not usable."""
    try:
        return read_secret(file), ""
    except click.BadParameter as error:
        return None, error.message


def _target(master: str | None, token: str | None, flaw: str) -> Target | None:
    """Return the run to examine; None if none is given and none is live."""
    given = master or os.environ.get(config.MASTER)
    if flaw and given:
        return Target(given, None)
    try:
        return find_target(master, None if flaw else token)
    except NoRun:
        return None
