"""Four peers behind NATs of all kinds, in virtual time: paths, reduces, shared state, training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import LANES_BETWEEN_MACHINES
from pccl.protocol.types import NS_PER_S, Descriptor, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, ReduceRequest
from pccl.stress.sim.faults.base import MS, Fault
from pccl.stress.sim.faults.connections import BehindNat, OneIpVersion
from pccl.stress.sim.process import MASTER_ADDRESS
from pccl.stress.sim.workloads.training_plan import Mode
from pccl.transports.sim.nat import Dependence
from tests.simulation.test_training import quiet
from tests.support.nat_table import TABLE, Place, paths_of, places_of, widths_of
from tests.support.virtual_runs import VirtualRun, run_faults

COUNT = 5000
REDUCES_MAX = 60
SLOW, SOON, LATE = {"443", "v4"}, 5, 10
"""Places from which a join takes longer: up to 5 s, until dials have failed."""


def nats(cell: str) -> list[Fault]:
    """The NATs of a cell, as faults of a scenario."""
    found: list[Fault] = []
    places = places_of(cell)
    for place in dict.fromkeys(places):
        peers = tuple(index for index, one in enumerate(places) if one == place)
        if place.version:
            found.append(OneIpVersion(peers, place.version))
        elif place.nat is not None:
            found.append(behind(place, peers))
    return found


def behind(place: Place, peers: tuple[int, ...]) -> Fault:
    assert place.nat is not None
    return BehindNat(
        peers,
        refuses=True,
        is_symmetric=place.nat.mapping is not Dependence.NOTHING,
        together=place.is_home,
        filtering=place.nat.filtering,
        shares_address=place.is_shared,
        hairpins=place.nat.hairpins,
        ports=(MASTER_ADDRESS.port,) if place.is_barred else (),
    )


def place_all(run: VirtualRun, cell: str) -> None:
    """Put the hosts of a run where the cell says."""
    places, network = places_of(cell), run.network
    for index, (host, place) in enumerate(zip(run.hosts, places, strict=True)):
        if place.version:
            network.addresses.versions[host.name] = place.version
        if place.is_home:
            network.addresses.local[host.name] = 1
        if place.nat is None:
            continue
        ports = (MASTER_ADDRESS.port,) if place.is_barred else ()
        kind = replace(place.nat, ports=ports)
        if not place.is_shared:
            network.addresses.translate(kind, host.name)
        elif place not in places[:index]:
            names = [
                one.name for one, where in zip(run.hosts, places, strict=True) if where == place
            ]
            network.addresses.translate(kind, *names, outside="nat")


@pytest.mark.parametrize(("cell", "paths"), TABLE)
def test_how_each_pair_reaches_each_other(cell: str, paths: str) -> None:
    """Here the NATs do not answer dials."""
    run = VirtualRun([0] * 4, {"latency_ns": 10 * MS}, relays=True)
    place_all(run, cell)

    async def join(index: int) -> None:
        await run.sleep(index / 10)  # their ids are in this order
        await run.engines[index].connect(JoinRequest(min_peers=4))

    async def reduce(engine: PeerEngine) -> int:
        values = np.full(COUNT, engine.machine.peer, np.int64)
        descriptor = Descriptor(DataType.INT64, ReduceOp.SUM, COUNT)
        request = ReduceRequest(borrow(values, values), ReduceCall(0, 0, descriptor), retry=True)
        await engine.reduce(request)
        return int(values.min()) + int(values.max())

    async def main() -> None:
        await run.master.start(MASTER_ADDRESS)
        await run.all([join(index) for index in range(4)])
        assert [engine.machine.peer for engine in run.engines] == [1, 2, 3, 4]
        for _ in range(REDUCES_MAX):
            assert await run.all([reduce(engine) for engine in run.engines]) == [20] * 4
            if paths_of(run.engines) == paths:
                break
            await run.sleep(0.5)
        await run.sleep(30.0)
        assert await run.all([reduce(engine) for engine in run.engines]) == [20] * 4
        assert paths_of(run.engines) == paths, "and it stays so"
        await run.sleep(5.0)
        for path in "dbpr":
            widths = widths_of(run.engines, path)
            used = {1} if path == "r" else {LANES_BETWEEN_MACHINES}
            assert widths <= {1, *used}, "a link that carries nothing has one lane"
            assert widths >= used or path not in paths, "a punched link is as wide as another one"
        await run.close()

    run.run_test(main())


@pytest.mark.parametrize("cell", [cell for cell, _ in TABLE])
def test_they_train(cell: str) -> None:
    """Checkers compare results and states. Here the NATs refuse dials, which ends them early."""
    scenario = quiet(Mode.SYNCHRONOUS)
    assert scenario.training is not None
    stop_ns = (LATE if SLOW.intersection(cell.split()) else SOON) * NS_PER_S
    training = replace(scenario.training, min_peers=4, step_ns=stop_ns // 50)
    scenario = replace(
        scenario,
        peers=4,
        late_peers=0,
        machine_size=1,
        relays=True,
        stop_ns=stop_ns,
        training=training,
    )
    verdict = run_faults(scenario, *nats(cell))
    assert verdict.endings == {"finished": 4}
    assert verdict.done["round"] > 3
    assert verdict.done["training sync"] > 3
    assert "removed alive" not in verdict.done
