"""``RayRun``: starts a run in a Ray cluster, and returns the results of its peers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from pccl.addresses import parse_masters
from pccl.bindings.ray.library import on_node, ray
from pccl.bindings.ray.policy import peer_options
from pccl.bindings.ray.supervisor import PeerPlace, RunOutcome, RunPlan, Supervisor
from pccl.checks import check_range
from pccl.config import DRAIN_MAX_S, resolve_token

__all__ = ["PeerPlace", "RayRun"]

NAMESPACE = "pccl"
"""Ray namespace of the runs that have a name."""

PEERS_MAX = 10_000


class RayRun:
    """A run whose peers are actors that Ray places. It begins at once.

        with RayRun(train, peers=4, options={"num_gpus": 1}) as run:
            results = run.wait()

    Each peer calls ``train`` in a process of its own, in which ``pccl.Communicator()`` needs no
    arguments. A peer that is lost is replaced when the cluster has the resources, until the first
    peer has returned. Peers on a node that Ray drains hand over their work, as after SIGTERM under
    ``pccl launch``.

    A small actor on the node of the caller supervises the peers. If this actor or the node ends, so
    do the peers.

    Args:
        train: function of each peer, without arguments, which Ray must be able to pickle.
            ``wait`` returns its results.
        peers: number of peers. They start as soon as the cluster has the resources.
        options: options of the peers' actors, such as ``num_gpus``, ``resources``, ``runtime_env``
            or ``scheduling_strategy`` of ``ray.remote``. Without them: one CPU, ``SPREAD``.
        environment: environment variables of all peers.
        master: ``"host:port"`` of a master outside; several separated by commas. None: an actor on
            the caller's node is the master; if it dies, another one starts at its address.
        token: the secret of the run; None: with ``master``, PCCL_TOKEN or PCCL_TOKEN_FILE of the
            caller; otherwise a new one.
        drain_s: seconds after SIGTERM in which a peer may still contribute its work.
        failures_max: how often in a row the peer of a slot may raise or die. Then the run fails.
            A peer that is lost with its node, or leaves after a notice, does not count.
        name: name for ``attach``. The run then continues when the calling program has ended, until
            ``stop``. None: the run ends with the calling program, or with this object.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RayError: Ray cannot start the run.
    """

    def __init__(
        self,
        train: Callable[[], Any],
        *,
        peers: int,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        master: str | None = None,
        token: str | None = None,
        drain_s: float = 20.0,
        failures_max: int = 3,
        name: str | None = None,
    ) -> None:
        if master is not None:
            parse_masters(master)
        if not 0 <= drain_s <= DRAIN_MAX_S:
            raise ValueError(f"drain_s must be from 0 to {DRAIN_MAX_S}, not {drain_s!r}")
        if token is None and master is None:
            token = secrets.token_urlsafe(32)
        secret = resolve_token(token)
        plan = RunPlan(
            train=ray.cloudpickle.dumps(train),
            peers=check_range("peers", peers, 1, PEERS_MAX),
            options=peer_options(options),
            environment=dict(environment or {}),
            master=master,
            token=None if secret is None else os.fsdecode(secret),
            drain_s=drain_s,
            failures_max=check_range("failures_max", failures_max, 0, PEERS_MAX),
        )
        if not ray.is_initialized():
            ray.init()
        actor_options: dict[str, Any] = {
            "num_cpus": 0,
            "max_concurrency": 2 * peers + 100,  # each peer waits in one call
            "scheduling_strategy": on_node(ray.get_runtime_context().get_node_id()),
        }
        if name is not None:
            actor_options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        self._supervisor = ray.remote(Supervisor).options(**actor_options).remote(plan)
        try:
            ray.get(self._supervisor.start.remote())
        except BaseException:
            ray.kill(self._supervisor)
            raise

    @classmethod
    def attach(cls, name: str) -> RayRun:
        """Return the run that another program has started with a name.

        Raises:
            ValueError: there is no such run.
        """
        run = cls.__new__(cls)
        run._supervisor = ray.get_actor(name, namespace=NAMESPACE)
        return run

    @property
    def master(self) -> str:
        """Address of the master."""
        return str(ray.get(self._supervisor.master.remote()))

    def peers(self) -> tuple[PeerPlace, ...]:
        """Return where the peers run now."""
        places: tuple[PeerPlace, ...] = ray.get(self._supervisor.peers.remote())
        return places

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Wait until all peers have ended; return what they have returned, in order.

        A peer that was lost after the first one had returned has no result: None.

        Args:
            timeout_s: longest wait, in seconds; None: no limit.

        Raises:
            Exception: what the function of a peer raised, with its trace, as ``ray.get`` raises it;
                or ``RayActorError`` if the peer died. The other peers have then left.
            TimeoutError: the time is over; the run goes on.
        """
        outcome: RunOutcome = ray.get(self._supervisor.wait.remote(), timeout=timeout_s)
        if outcome.failure is not None:
            ray.get(outcome.failure)
        return [None if result is None else ray.get(result) for result in outcome.results]

    def stop(self) -> None:
        """End the run: the peers hand over their work and leave; then the master ends."""
        try:
            ray.get(self._supervisor.stop.remote())
        except ray.exceptions.RayActorError:
            return
        ray.kill(self._supervisor)

    def __enter__(self) -> RayRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
