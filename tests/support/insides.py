"""What is below the public faces of a communicator and of a master."""

from __future__ import annotations

from dataclasses import replace

import pccl
from pccl.machines.master.machine import MasterMachine
from pccl.machines.peer.events import LeaveCall
from pccl.protocol.handshake.certificates import certify
from pccl.protocol.handshake.keys import Signer
from pccl.protocol.handshake.opening import Opening
from pccl.protocol.types import PeerId
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.topology.wanted_link import WantedLink


def engine_of(comm: pccl.Communicator | pccl.aio.Communicator) -> PeerEngine:
    """The engine of a member."""
    return comm._session.engine  # pyright: ignore[reportPrivateUsage]


def port_of(comm: pccl.Communicator) -> tuple[str, int]:
    """Where a member listens."""
    listener = engine_of(comm)._listener  # pyright: ignore[reportPrivateUsage]
    assert listener is not None
    return "127.0.0.1", listener.address.port


def let_callers_leave(comm: pccl.Communicator) -> None:
    """End all calls that a member waits in, as if their time had run out."""
    engine = engine_of(comm)

    def leave() -> None:
        for number in list(engine.calls.open):
            engine.feed(LeaveCall(number, "the test let it leave"))

    comm._session._io.call(leave)  # pyright: ignore[reportPrivateUsage]


def lanes_of(comm: pccl.Communicator) -> int:
    """How many lanes a member has, to anybody."""
    links = engine_of(comm).keeper._links.all()  # pyright: ignore[reportPrivateUsage]
    return sum(len(link.lanes) for link in links)


def upkeep_of(comm: pccl.Communicator) -> dict[PeerId, WantedLink]:
    """What a member decides about its links by."""
    return engine_of(comm).keeper._upkeep._links  # pyright: ignore[reportPrivateUsage]


def signer_of_member(comm: pccl.Communicator) -> Signer:
    """The key of a member's process."""
    return engine_of(comm)._credentials.signer  # pyright: ignore[reportPrivateUsage]


def knows_the_time(comm: pccl.Communicator) -> bool:
    """Whether a member has heard a heartbeat, which says the time by the master's clock."""
    return engine_of(comm).machine.contact._clock_ahead_ms is not None  # pyright: ignore[reportPrivateUsage]


def server_of(node: pccl.MasterNode) -> MasterServer:
    """The server of a master that runs."""
    server = node._server  # pyright: ignore[reportPrivateUsage]
    assert server is not None
    return server


def machine_of(node: pccl.MasterNode) -> MasterMachine:
    """What a master knows."""
    return server_of(node).machine


def registered(node: pccl.MasterNode, opening: Opening, key: bytes) -> Opening:
    """The opening of a newcomer with this key, with a certificate of the master."""
    signer = machine_of(node).incarnation.signer
    certificate = certify(signer, opening.run, opening.source, key)
    return replace(opening, certificate=certificate.signature)


def master_port(node: pccl.MasterNode) -> tuple[str, int]:
    """Where a master listens."""
    host, _, port = node.address.rpartition(":")
    return host, int(port)
