"""The actors that run the master and the peers of a run."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import pccl
from pccl import config
from pccl.bindings.ray.library import ray
from pccl.bindings.ray.policy import EndKind

PAUSE_S = 1.0
"""Pause before a peer asks the supervisor again, in seconds."""


def start_master(token: str, port: int = 0, state: str | None = None) -> pccl.MasterNode:
    """Start a master on this node, at the address by which other nodes know it.

    Args:
        token: the run's secret.
        port: its port; 0: a free one.
        state: folder for the identity of its run; None: it learns the run from the members.
    """
    host = ray.util.get_node_ip_address()
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    node = pccl.MasterNode(listen, token=token, state=state)
    node.run()
    return node


class MasterActor:
    """Runs a master on the node of this actor. For the arguments see ``start_master``."""

    def __init__(self, token: str, port: int, state: str) -> None:
        self._node = start_master(token, port, state)

    def address(self) -> str:
        """Return the address of the master."""
        return self._node.address

    def __ray_shutdown__(self) -> None:
        """End the master, which would keep the process: Ray calls this before it ends the actor."""
        self._node.interrupt()

    def serve(self) -> None:
        """Never return: a call of this ends with this actor."""
        threading.Event().wait()


class GroupMasters:
    """Runs the masters of the groups with one name; each group is made anew after a loss.

    The n-th group that a rank joins is the n-th of all ranks, unless a rank has begun a newer one.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[pccl.MasterNode, str, set[int]]] = []

    def join(self, rank: int) -> tuple[str, str]:
        """Return address and token of the newest master, or of a new one if this rank has it."""
        if not self._groups or rank in self._groups[-1][2]:
            token = secrets.token_urlsafe(32)
            self._groups.append((start_master(token), token, set()))
            for ended, _, _ in self._groups[:-2]:  # members may still leave the one before
                ended.interrupt()
            del self._groups[:-2]
        node, token, ranks = self._groups[-1]
        ranks.add(rank)
        return node.address, token

    def __ray_shutdown__(self) -> None:
        """End the masters, as ``MasterActor`` does."""
        for node, _, _ in self._groups:
            node.interrupt()


class PeerActor:
    """One peer: runs the user's function in the main thread of this actor's process.

    SIGTERM reaches the communicators that the function makes, as under ``pccl launch``. Another
    thread waits for the notice of the supervisor, and turns it into this signal.
    """

    def __init__(self) -> None:
        self._is_running = self._is_told = False
        self._lock = threading.Lock()

    def node(self) -> str:
        """Return the id of the node on which this actor runs."""
        return str(ray.get_runtime_context().get_node_id())

    def run(
        self, supervisor: Any, number: int, train: bytes, environment: Mapping[str, str]
    ) -> tuple[EndKind, Any]:
        """Call the user's function.

        Args:
            supervisor: handle of the actor whose ``notice`` ends when this peer must leave.
            number: number of this peer for it.
            train: the function, pickled.
            environment: variables of this peer.

        Returns:
            How the function ended, and what it returned.

        Raises:
            Exception: as the function; RuntimeError for a ``SystemExit`` without notice.
        """
        os.environ.update(environment)
        os.environ.pop(config.TOKEN_FILE, None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # in place of Ray's handler
        self._is_running = True
        threading.Thread(target=self._await_notice, args=(supervisor, number), daemon=True).start()
        end: tuple[EndKind, Any] | None = None
        try:
            end = EndKind.RETURNED, ray.cloudpickle.loads(train)()
            with self._lock:
                self._is_running = False
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a late signal must not end a result
        except SystemExit as ended:
            if end is None and not self._is_told:
                raise RuntimeError(
                    f"the function of this peer raised SystemExit({ended.code!r}), but the run had "
                    "not told the peer to leave; let the function return when it has finished"
                ) from ended
            end = end or (EndKind.LEFT, None)
        finally:
            self._is_running = False
        return end

    def _await_notice(self, supervisor: Any, number: int) -> None:
        while True:
            try:
                ray.get(supervisor.notice.remote(number))
                break
            except ray.exceptions.ActorUnavailableError:  # ask again when the network is back
                time.sleep(PAUSE_S)
            except ray.exceptions.RayError:
                return  # the supervisor has ended, and Ray ends this actor with it
        with self._lock:
            if self._is_running:
                self._is_told = True
                os.kill(os.getpid(), signal.SIGTERM)
