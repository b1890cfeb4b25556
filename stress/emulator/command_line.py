"""The commands ``python -m pccl.stress proxy`` and ``verify-link``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Generator
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from pccl.addresses import parse_address
from pccl.cli.command_line import Seconds
from pccl.cli.streams import writing
from pccl.stress.emulator.proxy import Proxy
from pccl.stress.emulator.sorting import peer_of
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.emulator.thread import run_in_loop
from pccl.stress.emulator.verify import TOLERANCE, StreamMeasured, measure

STDIN = 0
READ_BYTES = 1 << 12


class LinkParameter(click.ParamType[LinkSpec]):
    """The type of an option that takes a link, in the form of :meth:`LinkSpec.parse`."""

    name = "SPEC"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> LinkSpec:
        """Parse a link."""
        if isinstance(value, LinkSpec):
            return value
        try:
            return LinkSpec.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PlaceParameter(click.ParamType[str]):
    """The type of an option that takes ``HOST:PORT``.

    Args:
        to_dial: whether the proxy dials this address, which excludes port 0.
    """

    name = "HOST:PORT"

    def __init__(self, *, to_dial: bool = False) -> None:
        self._to_dial = to_dial

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check an address."""
        try:
            address = parse_address(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._to_dial and address.port == 0:
            self.fail(f"{value!r} has port 0; write the port to dial", param, ctx)
        return str(address)


@click.command()
@click.option(
    "--to",
    type=PlaceParameter(to_dial=True),
    required=True,
    help="Target of all connections.",
)
@click.option(
    "--link",
    "spec",
    type=LinkParameter(),
    required=True,
    help="Any of rate=200mbit,rtt=80ms,flow=100mbit,jitter=2ms,window=8mib,corrupt=0.1%.",
)
@click.option("--listen", type=PlaceParameter(), default="127.0.0.1:0", show_default=True)
@click.option("--per-peer", is_flag=True, help="One link per peer that dials, not one for all.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the jitter.")
@click.option("--until-eof", is_flag=True, hidden=True, help="Also end when stdin ends.")
def proxy(to: str, spec: LinkSpec, listen: str, per_peer: bool, seed: int, until_eof: bool) -> None:
    """Proxy connections over an emulated link until SIGTERM or Ctrl-C.

    The first line of output is "proxy listens on HOST:PORT".
    """
    one = Proxy(to, spec, listen=listen, link_of=peer_of if per_peer else None, seed=seed)
    try:
        run_in_loop(_serve(one, until_eof=until_eof))
    except BrokenPipeError:  # the reader of stdout has ended
        raise
    except OSError as error:
        click.echo(f"cannot proxy from {listen} to {to}: {error.strerror or error}", err=True)
        sys.exit(1)


async def _serve(one: Proxy, *, until_eof: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_stdin() -> None:
        if not os.read(STDIN, READ_BYTES):
            loop.remove_reader(STDIN)
            stop.set()

    try:
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        if until_eof:
            loop.add_reader(STDIN, on_stdin)
        one.start()
        with writing():
            click.echo(f"proxy listens on {one.address}")
        await stop.wait()
    finally:
        for number in signals:  # this loop ends, but its handlers would stay
            loop.remove_signal_handler(number)
        one.close()


@click.command("verify-link")
@click.option("--link", "spec", type=LinkParameter(), required=True, help="As for proxy.")
@click.option("--flows", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option("--seconds", type=Seconds(0.5, 600), default=5.0, show_default=True)
@click.option("--both-ways", is_flag=True, help="Send both ways at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def verify_link(spec: LinkSpec, flows: int, seconds: float, both_ways: bool, as_json: bool) -> None:
    """Send plain TCP streams through a proxy; exit with 1 if a result is more than 5 % off.

    The round trip is that of small messages on the idle link. The rate is that of all connections
    together, after a warm-up. The command needs a machine without other load.
    """
    with ending_on_sigterm():
        try:
            measured = measure(spec, flows=flows, seconds=seconds, both_ways=both_ways)
        except OSError as error:
            reason = error.strerror or str(error)
            raise click.ClickException(f"cannot measure the link: {reason}") from error
    with writing():
        if as_json:
            click.echo(json.dumps({**asdict(measured), "ok": measured.is_ok}))
        else:
            _show(measured)
    sys.exit(0 if measured.is_ok else 1)


@contextlib.contextmanager
def ending_on_sigterm() -> Generator[None, None, None]:
    """Make SIGTERM raise SystemExit in the block, so that the stack unwinds and the proxy ends."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(measured: StreamMeasured) -> None:
    table = Table("what", "asked", "measured", "off by")
    for name, asked, was, unit in (
        ("rate", measured.asked_bps, measured.rate_bps, 1e6),
        ("rate back", measured.asked_bps, measured.rate_back_bps, 1e6),
        ("round trip", measured.asked_rtt_s, measured.rtt_s, 1e-3),
    ):
        if was is None:
            continue
        words = "Mbit/s" if unit == 1e6 else "ms"
        off = f"{was / asked - 1:+.1%}" if asked else "-"
        limit = f"{asked / unit:.1f} {words}" if asked else "no limit" if unit == 1e6 else "none"
        table.add_row(name, limit, f"{was / unit:.1f} {words}", off)
    console = Console()
    console.print(table)
    verdict = "within" if measured.is_ok else "NOT within"
    console.print(
        f"{measured.flows} connections over {measured.link or 'a link without limits'}: {verdict} "
        f"{TOLERANCE:.0%}; the proxy used {measured.proxy_cpu_share:.0%} of a core",
        highlight=False,
        soft_wrap=True,
    )
