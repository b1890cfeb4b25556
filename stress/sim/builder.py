"""Builds the masters, the peers with their applications, and the links of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random

from pccl.machines.peer.events import PeerEffect, PeerEvent
from pccl.protocol.handshake.keys import SECRET_BYTES
from pccl.protocol.limits import EAGER_BYTES_MAX
from pccl.protocol.types import PeerId
from pccl.runtime.requests import PeerOptions
from pccl.stress.sim.checkers.excuses import MASTER_NAME, MASTERS, STANDBY_NAME
from pccl.stress.sim.links import Lips, SimLink
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import (
    MASTER_ADDRESS,
    STANDBY_ADDRESS,
    MasterProcess,
    MemoryStore,
    PeerProcess,
)
from pccl.stress.sim.workloads.application import Application
from pccl.stress.sim.workloads.collectives import Workload
from pccl.stress.sim.workloads.training_life import TrainingWorkload
from pccl.transports.base import Address
from pccl.transports.link import Link
from pccl.transports.sim.network import SimNetwork

_FIRST_LISTENING_PORT = 20000


class Builder:
    """Builds the masters, peers and links of one run.

    Args:
        parts: shared objects of the run.
        network: connects all hosts.
        rng: random generator of the network.
        on_event: called after every event of a peer's machine.
    """

    def __init__(
        self,
        parts: RunParts,
        network: SimNetwork,
        rng: Random,
        on_event: Callable[[PeerProcess, PeerEvent, list[PeerEffect]], None],
    ) -> None:
        self._parts = parts
        self._scenario = parts.scenario
        self._network = network
        self._rng = rng
        self._on_event = on_event
        self._stores = {name: MemoryStore() for name in MASTERS}

    def master(self, name: str, *, blank: bool = False) -> MasterProcess:
        """Build the master ``name``. ``blank``: the data that its predecessor stored is lost."""
        others: tuple[Address, ...] = ()
        if self._scenario.standby:
            others = (STANDBY_ADDRESS if name == MASTER_NAME else MASTER_ADDRESS,)
        secret = Random(f"{self._scenario.seed}/key of the run").randbytes(SECRET_BYTES)
        if blank:
            self._stores[name], secret = MemoryStore(), self._rng.randbytes(SECRET_BYTES)
        return MasterProcess(
            self._parts,
            self._network.host(name),
            self._rng,
            self._stores[name],
            others,
            secret,
            standby=name == STANDBY_NAME,
        )

    def peer(self, index: int, boots: int, lips: Lips) -> PeerProcess:
        """Build the process of seat ``index``, after ``boots`` earlier processes of that seat."""
        scenario = self._scenario

        def make_link(peer: PeerId) -> Link:
            shares = scenario.syncs is not None or scenario.training is not None
            if not scenario.repeats and not shares:
                return Link(peer)
            return SimLink(peer, lips, self._rng, scenario.repeats)

        options = PeerOptions(
            scenario.timing,
            token=scenario.token,
            segment_bytes=scenario.segment_bytes,
            other_masters=(STANDBY_ADDRESS,) if scenario.standby else (),
            lanes=0 if index % 2 else scenario.lanes,
            eager_bytes_max=EAGER_BYTES_MAX if index % 2 else scenario.eager_bytes_max,
        )
        if scenario.machine_size > 1:
            machine = f"m{index // scenario.machine_size}"
            self._network.memories.machines[f"p{index}"] = machine
        host = self._network.host(f"p{index}")
        if host.memory is not None and index % 4 == 1:
            host.memory.pull_bytes_min = scenario.segment_bytes  # it sends all shorter segments
        return PeerProcess(
            self._parts,
            host,
            options,
            self._on_event,
            make_link,
            index,
            _FIRST_LISTENING_PORT + boots,
        )

    def workload(self, process: PeerProcess, *, starts: bool) -> Application:
        """Build the application of ``process``. ``starts``: the process exists from the start."""
        if self._parts.application is not None:
            made: Application = self._parts.application(self._parts, process, starts)
            return made
        if self._scenario.training is None:
            return Workload(self._parts, process, starts=starts)
        return TrainingWorkload(self._parts, process)

    def spread_links(self, names: Sequence[str]) -> None:
        """Draw latency and rate of each pair's link, if the scenario has sites or uneven links."""
        scenario = self._scenario
        rates = (scenario.bytes_per_s, scenario.bytes_per_s, 2_000_000, 200_000)
        for (i, a), (j, b) in combinations(enumerate(names), 2):
            latency_ns, rate = scenario.latency_ns, scenario.bytes_per_s
            if scenario.uneven_links:
                latency_ns = self._rng.randint(1, 2 * scenario.latency_ns)
                rate = self._rng.choice(rates)
            if scenario.site_size > 1 and i // scenario.site_size == j // scenario.site_size:
                latency_ns = scenario.latency_ns // 100
            elif not scenario.uneven_links:
                continue
            self._network.set_link(a, b, latency_ns=latency_ns, bytes_per_s=rate)
