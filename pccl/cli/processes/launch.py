"""``pccl launch`` runs a master and several peers on this machine, in one terminal.

The library is for runs that lose peers, so the other peers continue when one ends, unless the user
gives ``--fail-fast``. No process of a launch outlives it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TypeAlias

import click

import pccl
from pccl import config
from pccl.addresses import PORT_MAX
from pccl.checks import PEER_GROUP_MAX
from pccl.cli import logs
from pccl.cli.command_line import (
    Seconds,
    Wrapper,
    check_address,
    check_switches,
    encrypt_option,
    metrics_option,
    min_peers_option,
    wrapped_command,
)
from pccl.cli.page import http_option, page_of
from pccl.cli.processes.children import Children, Ended
from pccl.cli.processes.peer_output import PeerOutput
from pccl.cli.processes.programs import find_program
from pccl.cli.runs.run_file import Unusable, own_keys_file, run_file
from pccl.cli.runs.stacks import stacks_folder
from pccl.errors import LinkError, LocalProtocolError
from pccl.master_node import KeysFile, ensure_token
from pccl.observe.logs import LEVEL
from pccl.observe.process import inspect_process

PEERS_MAX = 256
"""Each peer needs two pipes and a connection; a process may usually open 1024 descriptors."""

GRACE_S_MAX = 86400.0

ALARM_S = 0.5
"""Time between two alarms."""

LAST_OUTPUT_S = 1.0
"""Time for the last output after the peers are killed. The reader may be paused."""

PEER_INDEX = "PCCL_PEER_INDEX"

Handler: TypeAlias = Callable[[int, FrameType | None], None]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STATUS_NO_RESOURCES = 71
"""EX_OSERR of sysexits.h: the system has no more processes or descriptors."""


class LaunchedRun:
    """The peers of one launch, from their start to the exit status."""

    def __init__(
        self,
        children: Children[int],
        names: Sequence[str],
        grace_s: float,
        fail_fast: bool,
    ) -> None:
        self._names = names
        self._children = children
        self._output = PeerOutput(names)
        self._grace_s = grace_s
        self._fail_fast = fail_fast
        self._stopping = 0
        self._interrupted = 0
        self._killed = False
        self._kill_at_s = math.inf
        self._mute_at_s = 0.0
        self._first_failure = 0

    @property
    def status(self) -> int:
        """The exit status: of a signal, else of the first peer that failed, else 0."""
        return 128 + self._interrupted if self._interrupted else self._first_failure

    def say(self, text: str) -> None:
        """Print a message on stderr; ``run`` makes it visible."""
        self._output.complain(text)

    def run(self, command: Sequence[str], environments: Sequence[dict[str, str]]) -> None:
        """Start one peer for each environment; return when all peers have ended."""
        try:
            self._output.flush()
        except BrokenPipeError:
            self._on_reader_gone()
        for peer, environment in enumerate(environments):
            if self._stopping:
                break
            try:
                pid = self._children.start(peer, command, environment)
            except OSError as error:
                self._output.complain(f"cannot start {self._names[peer]}: {error.strerror}")
                self._first_failure = self._first_failure or STATUS_NO_RESOURCES
                self._stop(signal.SIGTERM)
                break
            if self._stopping:  # a signal came while the peer started
                self._children.send(self._stopping, pid)
        while self._children:
            self._tell()

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Pass the first signal to all peers; kill them at the second one."""
        # No call in this line, so no other signal interrupts it.
        is_first, self._stopping = not self._stopping, self._stopping or signum
        self._interrupted = self._interrupted or signum
        if is_first:
            self._stop(signum)
        else:
            self._kill()

    def on_alarm(self, signum: int, frame: FrameType | None) -> None:
        """Kill the peers when the grace period ends. Later, drop output that no process reads.

        Alarms come all the time, because a write to a paused terminal or a full pipe may block
        just after a signal has come. The next alarm interrupts the write, and runs its handler.
        """
        now_s = time.monotonic()
        if not self._killed:
            if now_s >= self._kill_at_s:
                self._kill()
        elif now_s >= self._mute_at_s:
            self._output.mute()  # the interrupted write goes on, to the null device

    def _tell(self) -> None:
        """Wait for output or ends of peers, print the output, and handle the ends."""
        try:
            for peer, what in self._children.hear():
                if isinstance(what, Ended):
                    self._on_end(peer, what)
                else:
                    self._output.write(peer, what)
            self._output.flush()
        except BrokenPipeError:
            self._on_reader_gone()

    def _on_reader_gone(self) -> None:
        """End the peers, because no process reads the output, as in ``pccl launch ... | head``."""
        self._output.mute()
        self._interrupted = self._interrupted or signal.SIGPIPE
        if not self._stopping:
            self._stop(signal.SIGTERM)

    def _on_end(self, peer: int, ended: Ended) -> None:
        if ended.status == 0:
            return
        if self._stopping:
            if ended.exit_code == -signal.SIGKILL and self._killed:
                name = self._names[peer]
                self._output.complain(f"killed {name}, which did not end at the signal")
            return
        self._first_failure = self._first_failure or ended.status
        self._output.complain(f"{self._names[peer]} failed: {ended}")
        if self._fail_fast:
            if self._children:
                self._output.complain("ending the other peers (--fail-fast)")
            self._stop(signal.SIGTERM)

    def _stop(self, signum: int) -> None:
        """Send ``signum`` to all peers, and start the grace period, after which they are killed."""
        self._stopping = signum
        self._children.send(signum)
        self._kill_at_s = time.monotonic() + self._grace_s
        if self._grace_s:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s % ALARM_S or ALARM_S, ALARM_S)
        else:
            self._kill()

    def _kill(self) -> None:
        self._mute_at_s = time.monotonic() + LAST_OUTPUT_S
        self._killed = True
        self._children.send(signal.SIGKILL)


@contextlib.contextmanager
def signals_for(launch: LaunchedRun) -> Generator[None, None, None]:
    """Install the signal handlers of a launch. SIGHUP stays ignored if it was, as under nohup.

    SIGINT gets a handler even if it was ignored, because shells ignore it for background commands.
    """
    wanted: dict[int, Handler] = dict.fromkeys(FORWARDED, launch.on_signal)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del wanted[signal.SIGHUP]
    wanted[signal.SIGALRM] = launch.on_alarm
    before = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
    try:
        signal.setitimer(signal.ITIMER_REAL, ALARM_S, ALARM_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def peer_environments(
    names: Sequence[str],
    master: str,
    token: str | None,
    group: int | None,
    min_peers: int | None,
    grace_s: float,
) -> list[dict[str, str]]:
    """Return the environment of each peer.

    Args:
        names: names of the peers.
        master: address of their master.
        token: the run's secret; None: as in the environment of this process.
        group: their peer group; None: as in the environment.
        min_peers: number of members that ``connect`` waits for; None: as in the environment.
        grace_s: seconds between SIGTERM and SIGKILL: they hand over their work in the first half.
    """
    common = {
        **os.environ,
        config.MASTER: master,
        config.PEERS: str(len(names)),
        "PYTHONUNBUFFERED": "1",
    }
    common.setdefault(config.DRAIN, "1")
    common.setdefault(config.DRAIN_S, f"{min(grace_s / 2, config.DRAIN_MAX_S):g}")
    common.setdefault(config.PROGRESS, "1")
    common[LEVEL] = common.get(LEVEL) or "info"
    if token is not None:
        common[config.TOKEN] = token
        common.pop(config.TOKEN_FILE, None)
    given = {config.GROUP: group, config.MIN_PEERS: min_peers}
    common |= {name: str(value) for name, value in given.items() if value is not None}
    return [{**common, PEER_INDEX: str(peer), config.NAME: name} for peer, name in enumerate(names)]


def peer_names(count: int, *, is_ours: bool) -> list[str]:
    """Return the names of the peers: ``p0``, ``p1``; with ``PCCL_NAME``: ``NAME-0``, ``NAME-1``.

    A ``NAME`` that is too long for a number is cut.

    Args:
        count: number of peers.
        is_ours: whether all peers of the run are children of this process. Otherwise the name of
            this host comes first.
    """
    if given := os.environ.get(config.NAME):
        return [config.numbered_name(given, f"-{peer}") for peer in range(count)]
    host = "" if is_ours else f"{os.uname().nodename[:40]}-"
    return [f"{host}p{peer}" for peer in range(count)]


def peers_metrics(metrics: str, count: int) -> list[str]:
    """Return the addresses of the peers' metrics: the ports after that of the master's.

    Raises:
        click.BadParameter: there are not so many ports.
    """
    first = config.resolve_metrics(metrics)
    assert first is not None
    if first.port + count > PORT_MAX:
        raise click.BadParameter(f"{count} peers need the ports after it", param_hint="--metrics")
    ports = [first.port and first.port + 1 + peer for peer in range(count)]
    return [str(replace(first, port=port)) for port in ports]


@contextlib.contextmanager
def own_token() -> Generator[tuple[str, str]]:
    """Yield a token for a run of this process, and the path of its keys, which end with the block.

    Without a safe folder for the keys, the path is empty, and the token is a plain secret.
    """
    with contextlib.ExitStack() as stack:
        try:
            keys = stack.enter_context(own_keys_file())
            token = ensure_token(KeysFile(keys))
        except (Unusable, LocalProtocolError):
            keys, token = "", secrets.token_urlsafe(32)
        yield token, keys


@contextlib.contextmanager
def own_master(
    port: int, token: str, keys: str, stacks: str, metrics: str | None, http: str | None
) -> Generator[str, None, None]:
    """Run a master in this process, for peers of this machine, and yield its address.

    Args:
        port: its port; 0: a free one.
        token: a token of the run.
        keys: path of the file with the run's keys; empty: there is none.
        stacks: directory in which the peers put their stacks when they are asked.
        metrics: where it serves its metrics; None: nowhere.
        http: address of the page that shows the run; None: there is none.
    """
    try:
        inspect = partial(inspect_process, folder=stacks)
        node = pccl.MasterNode(
            f"127.0.0.1:{port}",
            token=token,
            keys=keys or None,
            inspect_process=inspect,
            metrics=metrics,
        )
        node.run()
    except (ImportError, OSError) as error:  # of the metrics
        raise click.ClickException(getattr(error, "strerror", None) or str(error)) from error
    except LinkError as error:
        remedy = "choose another --port, or leave it out to get a free one"
        raise click.ClickException(f"{error.reason}; {remedy}") from error
    if node.metrics_url:
        click.echo(f"pccl launch: metrics of the master: {node.metrics_url}", err=True)
    try:
        with page_of(node, http, secured=True) as words:
            for line in words:
                click.echo(line, err=True)
            yield node.address
    finally:
        node.interrupt()


class LaunchCommand(Wrapper):
    """The click command ``pccl launch``."""

    example = "pccl launch -n 4 -- python train.py"


@click.command(cls=LaunchCommand, epilog=f"Example: {LaunchCommand.example}")
@click.option(
    "-n",
    "--peers",
    metavar="COUNT",
    type=click.IntRange(1, PEERS_MAX),
    default=2,
    show_default=True,
    help="Number of peers to start.",
)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(1, 65535),
    help="Port of the master, for scripts that contain one.  [default: a free one]",
)
@click.option(
    "--master",
    metavar="HOST:PORT",
    callback=check_address,
    help="Join the run of this master instead of starting one.",
)
@click.option(
    "--group",
    metavar="GROUP",
    type=click.IntRange(0, PEER_GROUP_MAX),
    help="Peer group of all peers (PCCL_GROUP).",
)
@min_peers_option()
@encrypt_option()
@metrics_option("Serve metrics for Prometheus: of the master here, of the peers at the next ports.")
@click.option("--fail-fast", is_flag=True, help="End all peers when one fails.")
@click.option(
    "--grace",
    "grace_s",
    envvar="PCCL_LAUNCH_GRACE",
    metavar="SECONDS",
    type=Seconds(0.0, GRACE_S_MAX),
    default=10.0,
    show_default=True,
    help="Time in which peers may end after a signal, before they are killed.",
)
@http_option()
@logs.verbose_option(logging.ERROR)  # the peers say what the master would warn of
@click.pass_context
def launch(
    ctx: click.Context,
    peers: int,
    port: int | None,
    master: str | None,
    group: int | None,
    min_peers: int | None,
    metrics: str | None,
    fail_fast: bool,
    grace_s: float,
    http: str | None,
) -> None:
    """Start a master and several peers on this machine.

    Each peer runs COMMAND. PCCL_MASTER holds the master's address, so pccl.Communicator() needs no
    address. PCCL_PEER_INDEX holds the peer's number, from 0, and PCCL_PEERS the number of peers.
    The output of peers appears line by line, with the peer's name before each line: PCCL_NAME and
    the number, or p0, p1 and so on.

    When a peer fails, the other peers continue. The exit status is 0 if all peers end with 0,
    otherwise the status of the first failed peer. Ctrl-C and SIGTERM go to all peers, which leave
    the run before they end. A second signal kills them.
    """
    if master is not None and port is not None:
        raise click.UsageError("give --port or --master, not both: --port is for a new master")
    if master is not None and http is not None:
        raise click.UsageError("give --http to the process that runs the master, not with --master")
    check_switches()
    their_metrics = peers_metrics(metrics, peers) if metrics is not None else []
    name, *arguments = wrapped_command(ctx)
    command = [find_program(name), name, *arguments]
    with Children[int]() as children, contextlib.ExitStack() as stack:
        names = peer_names(peers, is_ours=master is None)
        started = LaunchedRun(children, names, grace_s, fail_fast)
        stack.enter_context(signals_for(started))
        if master is None:
            stacks = stack.enter_context(stacks_folder())
            token, keys = stack.enter_context(own_token())
            address = stack.enter_context(own_master(port or 0, token, keys, stacks, metrics, http))
            try:
                stack.enter_context(run_file(address, token, (name, *arguments), keys))
                started.say(f"the master is {address}; see the run with: pccl status")
            except Unusable as error:
                started.say(f"`pccl status` will not find this run: {error}")
            environments = peer_environments(names, address, token, group, min_peers, grace_s)
            for environment in environments:
                environment[config.STACKS_DIR] = stacks
        else:
            environments = peer_environments(names, master, None, group, min_peers, grace_s)
        if (given := os.environ.get(config.NAME)) and not names[-1].startswith(f"{given}-"):
            started.say(f"{config.NAME} is too long for numbers after it: {names[-1]} and so on")
        for environment, where in zip(environments, their_metrics, strict=False):
            environment[config.METRICS] = where
        started.run(command, environments)
    ctx.exit(started.status)
