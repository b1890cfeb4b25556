"""Joins the run; which peer has which rank.

Under ``pccl launch`` and ``pccl join`` the run exists already: ``PCCL_MASTER`` names it. Ranks are
the places in its ring, and the run keeps the keys of torch's ``Store``. Under torchrun, or with an
explicit rank, torch's own rendezvous gives ranks and a store. Then rank 0 runs a master, and the
others find it in that store.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pccl
from pccl.bindings.gradient_averager.replica import AveragedReplica
from pccl.bindings.process_group.store import RunStore
from pccl.bindings.process_group.untyped import dist
from pccl.config import MASTER, MIN_PEERS, PEERS
from pccl.errors import NotConnected, PCCLError

DEFAULT_TIMEOUT = timedelta(minutes=30)

FAREWELL_S = 10.0
"""How long the master of rank 0 waits for the other ranks to leave."""

_TOKEN_BYTES = 32
_POLL_S = 0.02


@dataclass(slots=True)
class ProcessMembership:
    """The membership of this process, of which there is at most one.

    Attributes:
        comm: its communicator.
        master: the master that this process runs.
        token: its secret.
        peers: peer id of each rank of the default group.
        replica: model and optimizer of ``reconfigure``.
        is_reconfigured: whether the default group ends only to be made anew.
        is_apart: whether new groups begin apart, because the members meet in ``reconfigure``.
    """

    comm: pccl.Communicator
    master: pccl.MasterNode | None = None
    token: str | None = None
    peers: tuple[int, ...] = ()
    replica: AveragedReplica | None = None
    is_reconfigured: bool = False
    is_apart: bool = False

    @property
    def is_member(self) -> bool:
        """Whether this process is in the run now."""
        try:
            return self.comm.peer_id in [member.peer_id for member in self.comm.members()]
        except NotConnected:
            return False

    def group_ended(self) -> None:
        """Leave the run with the default group, unless it is made anew."""
        if not self.is_reconfigured:
            self.leave()

    def look(self) -> bool:
        """Give ranks to the present members; return whether these are other ones than before."""
        before, self.peers = self.peers, tuple(m.peer_id for m in self.comm.members())
        return self.peers != before

    def find_elders(self) -> None:
        """Begin apart if this process has joined members that call ``reconfigure``.

        The eldest member has rank 0. It admits newcomers only after its own first ``reconfigure``.
        """
        self.is_apart = self.comm.store.check([_mark_of(self.peers[0])])

    def has_state(self) -> None:
        """Record for newcomers that this process has ended its first ``reconfigure``."""
        self.comm.store.set(_mark_of(self.comm.peer_id), b"")

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.peers.index(self.comm.peer_id)

    @property
    def store(self) -> Any:
        """The run's store, with keys of the present members only."""
        name = hashlib.blake2b(repr(self.peers).encode(), digest_size=8).hexdigest()
        return dist.PrefixStore(name, RunStore(self.comm))

    def leave(self) -> None:
        """Leave the run; a master waits until the others have left."""
        global _joined, _size_left
        _joined = None
        with suppress(NotConnected):
            _size_left = len([m for m in self.comm.members() if m.peer_id in self.peers])
        self.comm.close()
        if self.master is not None:
            until_s = time.monotonic() + FAREWELL_S
            with suppress(PCCLError, OSError):
                while time.monotonic() < until_s and self._is_in_use(self.master):
                    time.sleep(_POLL_S)
            self.master.interrupt()

    def _is_in_use(self, master: pccl.MasterNode) -> bool:
        status = pccl.master_status(master.address, token=self.token, timeout_s=FAREWELL_S)
        return bool(status.members)


def _mark_of(peer: int) -> str:
    return f"pccl.torch.reconfigures.{peer}"


_joined: ProcessMembership | None = None

_size_left: int | None = None
"""Number of live ranks of the default group that this process has left: all may come again."""


def joined() -> ProcessMembership | None:
    """Return the membership of this process; None: it has none."""
    return _joined


def _keep(one: ProcessMembership) -> ProcessMembership:
    global _joined
    _joined = one
    return one


def _leave_at_exit() -> None:
    if _joined is not None:
        _joined.leave()


def join_run(timeout: timedelta) -> ProcessMembership:
    """Join the run that the environment names, together with the peers of the same launch."""
    wanted: int | None = None
    if not os.environ.get(MIN_PEERS):
        wanted = _size_left or int(os.environ.get(PEERS, "1"))
        with suppress(PCCLError):  # who is started again joins those that are there
            wanted = 1 if not _size_left and pccl.master_status().members else wanted
    comm = pccl.Communicator()
    comm.connect(min_peers=wanted, timeout_s=timeout.total_seconds())
    one = ProcessMembership(comm)
    one.look()
    one.find_elders()
    return _keep(one)


def found_run(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessMembership:
    """Join a run of as many members as torch's rendezvous found; rank 0 founds it.

    Raises:
        RuntimeError: the run has other members, too.
    """
    timeout_s, master = timeout.total_seconds(), None
    address, token = os.environ.get(MASTER), None
    if not address:
        if rank == 0:
            token = secrets.token_urlsafe(_TOKEN_BYTES)
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            is_local = host in ("localhost", "127.0.0.1", "::1")
            master = pccl.MasterNode("127.0.0.1:0" if is_local else "0.0.0.0:0", token=token)
            master.run()
            # Functions of ``atexit`` run only when all masters of the process have ended.
            threading._register_atexit(_leave_at_exit)  # type: ignore[attr-defined]
            port = master.address.rpartition(":")[2]
            address = f"{'127.0.0.1' if is_local else host}:{port}"
            store.set("pccl", f"{address} {token}")
        address, token = store.get("pccl").decode().split(" ")
    comm = pccl.Communicator(address, token=token)
    comm.connect(min_peers=size, timeout_s=timeout_s)
    one = _keep(ProcessMembership(comm, master, token))
    ranks: list[Any] = comm.all_gather_object(rank, timeout_s=timeout_s)
    if sorted(ranks) != list(range(size)):
        raise RuntimeError(
            f"the run at {address} has members with the ranks {ranks}, not one of each from 0 to "
            f"{size - 1}; give each job a run of its own"
        )
    ring = [member.peer_id for member in comm.members()]
    one.peers = tuple(ring[ranks.index(each)] for each in range(size))
    return one


def rendezvous(timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Generator[tuple[Any, int, int]]:
    """Join the run of the launch; yield store, rank and size, as torch's handlers do."""
    one = joined() or join_run(timeout)
    yield one.store, one.rank, len(one.peers)
    raise RuntimeError("the ranks of a run change in pccl.torch.reconfigure()")
