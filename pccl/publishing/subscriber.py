"""``Subscriber``: reads the versions that the members of a run publish."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl import checkpoint
from pccl._api.listening import reachable_at
from pccl.checks import check_timeout, check_timing, check_type
from pccl.config import (
    resolve_advertise,
    resolve_encrypt,
    resolve_group,
    resolve_interface,
    resolve_listen,
    resolve_masters,
    resolve_name,
    resolve_token,
    resolve_upload_max,
)
from pccl.errors import NotConnected, PCCLError, named
from pccl.observe.logs import show_log
from pccl.protocol.limits import Timing
from pccl.runtime.clock import LoopClock
from pccl.runtime.control.greeting import encryption
from pccl.runtime.hashing import PooledHasher
from pccl.runtime.io_thread import IOThread, Submission, ended
from pccl.runtime.publishing.copies import as_array
from pccl.runtime.publishing.reader import ReaderEngine, ReadVersion
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import Loose
from pccl.shared_state import SharedState
from pccl.state.versions import name_and_shape

__all__ = ["Subscriber", "Version"]


class Version:
    """One version of a shared state, complete and verified. Its contents never change."""

    def __init__(self, read: ReadVersion) -> None:
        self._read = read

    def __repr__(self) -> str:
        return f"<Version {self.number}: {len(self.tensors)} tensors, {self.nbytes} bytes>"

    @property
    def number(self) -> int:
        """The revision of the state when the members published it."""
        return self._read.version.number

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return self._read.version.nbytes

    @property
    def digest(self) -> str:
        """Digest of the contents: equal for equal tensors of equal lengths."""
        return self._read.version.state.content.hex()

    @cached_property
    def tensors(self) -> Mapping[str, npt.NDArray[Any]]:
        """The tensors by name, as read-only arrays that share the memory of this version."""
        memory = self._read.memory
        named_shapes = map(name_and_shape, memory.layout.entries)
        return MappingProxyType(
            {
                name: as_array(memory, index, shape)
                for index, (name, shape) in enumerate(named_shapes)
            }
        )

    def load(self, shared_state: SharedState) -> None:
        """Copy this version into the tensors of a state, also on CUDA devices; set its revision.

        Tensors that may differ between members stay as they are.

        Raises:
            ValueError: the tensors have other names, dtypes or lengths, or another order.
        """
        state = check_type("shared_state", shared_state, SharedState)
        memory, plain = state.memory, self._plain
        shared = [n for n, entry in enumerate(memory.layout.entries) if not entry.may_differ]
        here = [str(memory.layout.entries[index]) for index in shared]
        if (there := [str(entry) for entry in plain.layout.entries]) != here:
            pairs = zip(there, here, strict=False)
            what = f"{len(there)} tensors, not {len(here)}"
            if differs := [pair for pair in pairs if len({*pair}) > 1]:
                what = f"the tensor {differs[0][0]} where the state has {differs[0][1]}"
            raise ValueError(
                f"version {self.number} has {what}; make a state with the tensors of the version"
            )
        with memory.claimed():
            memory.touch_all()
            for index, view in zip(shared, plain.views, strict=True):
                memory.views[index][:] = view
            memory.store(shared)
        state.synchronized(self.number, self._read.version.lineage)

    def save(self, path: checkpoint.Path) -> None:
        """Write this version as a checkpoint, which :meth:`pccl.SharedState.load` reads.

        The new file replaces an older one only when it is complete and on the disk.

        Raises:
            OSError: the file cannot be written.
            ValueError: safetensors files do not allow a name, or the number of tensors.
        """
        shapes = [array.shape for array in self.tensors.values()]
        lineage = self._read.version.lineage
        checkpoint.write(path, self._plain, shapes, self.number, lineage)

    @cached_property
    def _plain(self) -> StateMemory:
        """The same memory, with names that contain no shapes."""
        entries = self._read.memory.layout.entries
        arrays = [np.reshape(array, -1) for array in self.tensors.values()]
        return StateMemory(
            [
                Loose(name, array, entry.dtype)
                for name, array, entry in zip(self.tensors, arrays, entries, strict=True)
            ]
        )


class Subscriber:
    """Reads, from outside a run, what a group publishes, and serves it to other readers.

    It is not a member, so no call of the run waits for it. It subscribes in the background, finds
    another master or source if one is lost, and keeps the newest version. Each version that it
    returns is complete and verified. It skips versions that come faster than ``next`` is called.

    Args:
        address: address of the master, as for :class:`pccl.Communicator`.
        peer_group: the group whose versions it reads. None: ``PCCL_GROUP``, otherwise 0.

    All other arguments are those of :class:`pccl.Communicator`.

    Raises:
        ValueError, TypeError: an argument is missing, malformed or out of range.
        LinkError: it cannot open its port.
    """

    def __init__(
        self,
        address: str | None = None,
        peer_group: int | None = None,
        *,
        token: str | bytes | None = None,
        timing: Timing | None = None,
        advertise: str | None = None,
        listen: str | None = None,
        interface: str | None = None,
        name: str | None = None,
        upload_bytes_per_s_max: int | None = None,
    ) -> None:
        masters, group = resolve_masters(address), resolve_group(peer_group)
        advertised, bound = resolve_advertise(advertise), resolve_listen(listen)
        reachable = reachable_at(masters[0], advertised, bound, resolve_interface(interface))
        options = replace(
            reachable,
            timing=check_timing(timing),
            token=resolve_token(token),
            name=resolve_name(name),
            encrypts=encryption(always=resolve_encrypt()),
            upload_bytes_per_s_max=resolve_upload_max(upload_bytes_per_s_max),
        )
        show_log(options.name)
        self._last: ReadVersion | None = None
        user = object()

        def make() -> ReaderEngine:
            transport = self._io.transport.through(options.interface)
            clock, hasher = LoopClock(self._io.loop), PooledHasher(self._io.loop)
            return ReaderEngine(
                self._io.loop, clock, transport, tuple(masters), group, options, hasher
            )

        try:
            self._io = IOThread.acquire(user)
            self._engine = self._io.call(make)
            self._io.submit(self._engine.start).wait()
            leave = partial(self._io.leave, user, self._engine.close)
            self._finalizer = weakref.finalize(self, leave)
        except PCCLError as error:
            IOThread.give_up(user)
            raise named(error, "Subscriber") from None
        except BaseException:
            IOThread.give_up(user)
            raise

    def __repr__(self) -> str:
        held = self.version
        return f"<Subscriber: {'no version yet' if held is None else held}>"

    @property
    def version(self) -> Version | None:
        """The newest complete version; None: there is none yet. ``next`` ignores this."""
        held = self._engine.held
        return None if held is None else Version(held)

    @property
    def received_bytes(self) -> int:
        """Bytes that it has received from members and other readers so far."""
        exchange = self._engine.exchange
        if not self._finalizer.alive or self._io.abandoned:
            return exchange.total_received_bytes
        return self._io.call(lambda: exchange.total_received_bytes)

    def next(self, timeout_s: float | None = None) -> Version:
        """Wait for a version that this method has not returned yet, and return the newest.

        Args:
            timeout_s: budget of the call in seconds; None: no limit.

        Raises:
            DeadlineExceeded: the budget ran out; the message says what is missing.
            NotAdmitted: the master refuses this reader; the message says why.
            NotConnected: the subscriber is closed.
        """
        with _named():
            self._last = self._submitted(timeout_s).wait()
        return Version(self._last)

    async def next_async(self, timeout_s: float | None = None) -> Version:
        """Do the same as :meth:`next`, for asyncio."""
        with _named():
            submission = self._submitted(timeout_s)
            finished = submission.start().finished
            try:
                await ended(finished)
            except asyncio.CancelledError:
                submission.cancel()
                raise
            self._last = finished.result()
        return Version(self._last)

    def _submitted(self, timeout_s: float | None) -> Submission[ReadVersion]:
        limit_s, last = check_timeout(timeout_s), self._last
        if not self._finalizer.alive or self._io.abandoned:
            raise NotConnected(reason="the subscriber is closed; make a new one")
        return self._io.submit(lambda: self._engine.next(last, limit_s))

    def __iter__(self) -> Iterator[Version]:
        """Yield each next version; the loop ends when another thread closes the subscriber."""
        while self._finalizer.alive:
            try:
                yield self.next()
            except NotConnected:
                return

    def close(self) -> None:
        """Close all connections. Idempotent. Versions stay valid."""
        self._finalizer()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _named() -> Generator[None, None, None]:
    try:
        yield
    except PCCLError as error:
        failure = named(error, "Subscriber.next")
    else:
        return
    raise failure
