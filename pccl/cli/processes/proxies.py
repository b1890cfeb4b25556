"""Proxies that emulate links: worker processes, one in front of each target."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Sequence

import click

from pccl.cli.processes.crew import Crew, ProcessDied

HOST = "127.0.0.1"

PROXY_SAYS = "proxy listens on "


def check_link(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Refuse an invalid description of a link; an empty one means no emulated link."""
    from pccl.stress.emulator.spec import LinkSpec

    try:
        LinkSpec.parse(value or "rtt=0ms")
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@contextlib.contextmanager
def proxied(crew: Crew, link: str, targets: Sequence[str], *options: str) -> Generator[list[str]]:
    """Start a proxy for each target, which may listen later; yield the proxies' addresses.

    Raises:
        click.ClickException: a proxy did not start.
    """
    names = [f"proxy for {target}" for target in targets]
    for name, target in zip(names, targets, strict=True):
        arguments = ["proxy", "--to", target, "--link", link, "--listen", f"{HOST}:0", *options]
        crew.start(name, "pccl.stress", arguments)
    try:
        said = crew.first_lines(names)
    except ProcessDied as death:
        raise death.to_error() from death
    yield [said[name].removeprefix(PROXY_SAYS) for name in names]
    crew.dismiss(names)


def free_addresses(count: int) -> list[str]:
    """Return addresses with free ports, for processes that need an address before they start."""
    return [f"{HOST}:{port}" for port in asyncio.run(_free_ports(count))]


async def _free_ports(count: int) -> list[int]:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(await asyncio.start_server(hang_up, HOST, 0))
            for _ in range(count)
        ]
        return [server.sockets[0].getsockname()[1] for server in servers]
