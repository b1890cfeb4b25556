"""The command ``python -m pccl.stress sites``."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import click

from pccl.cli.streams import writing
from pccl.stress.emulator.sites.matrix import SITES_MAX, SITES_MIN, SiteMatrix
from pccl.stress.emulator.sites.packets import OUTSIDE
from pccl.stress.emulator.sites.router import SiteRouter
from pccl.stress.emulator.sites.tunnels import MTU_BYTES, SitesRefused

OUTSIDE_NAME = "outside"


class MatrixParameter(click.ParamType[SiteMatrix]):
    """The type of an argument that names a matrix."""

    name = "MATRIX"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> SiteMatrix:
        """Load a matrix."""
        if isinstance(value, SiteMatrix):
            return value
        try:
            return SiteMatrix.load(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("matrix", type=MatrixParameter())
@click.option("--scale", type=click.FloatRange(1), default=1.0, help="Divide all rates by this.")
@click.option(
    "--first", type=click.IntRange(SITES_MIN, SITES_MAX), help="Only this number of sites."
)
@click.option(
    "--machines",
    type=click.IntRange(1, SITES_MAX),
    default=1,
    help="So many sites at the place of each, behind one port.",
)
@click.option(
    "--mtu",
    type=click.IntRange(576, 65_535),
    default=MTU_BYTES,
    show_default=True,
    help="Bytes of a packet; small ones cost more of the processor.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the jitter.")
def sites(
    matrix: SiteMatrix, scale: float, first: int | None, machines: int, mtu: int, seed: int
) -> None:
    """Emulate the network of MATRIX (aws10, gcp12, home8, or a file) until SIGTERM or Ctrl-C.

    Prints a line for each site: its name, its address, and the path of its namespace, in which
    "nsenter --net=PATH" runs a program. The site "outside" has no limits. Needs root on Linux.
    """
    try:
        chosen = matrix.chosen(scale, first, machines)
        router = SiteRouter(chosen, mtu, seed)
    except (ValueError, SitesRefused) as error:
        raise click.ClickException(str(error)) from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with router, contextlib.suppress(KeyboardInterrupt):
        with writing():
            for number, name in (*enumerate(chosen.sites), (OUTSIDE, OUTSIDE_NAME)):
                click.echo(f"{name}\t{router.host(number)}\t{router.namespace(number)}")
        router.run()
    network = router.network
    click.echo(f"carried {network.carried_bytes / 1e6:.0f} MB, dropped {network.dropped} packets")
