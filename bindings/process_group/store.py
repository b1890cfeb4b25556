"""``RunStore``: torch's ``Store`` over the key-value store of a run.

It needs no process of its own, and survives the death of any member, and of the master if a master
comes back. torch's C++ code calls ``deleteKey`` and ``getNumKeys``, Python code the other names.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import Store as TorchStore

from pccl import Communicator
from pccl.communicator import Store
from pccl.errors import DeadlineExceeded, MembershipError, NotConnected, PCCLError

_KEY_BYTES_MAX = 256

_kept: WeakKeyDictionary[Communicator, list[RunStore]] = WeakKeyDictionary()
"""The stores of each communicator: torch keeps the C++ half of a store, but not the Python half."""


class RunStore(TorchStore):
    """The keys of a run. All members of all groups see the same ones; any thread may call.

    ``get`` and ``wait`` wait for ``timeout`` (``set_timeout``), 300 s by default. Queues and
    ``list_keys`` are not supported.

    Args:
        comm: a member of the run. The program keeps it as long as it uses the store.

    Raises:
        DistStoreError: a key did not come in time, or the store is full.
        DistNetworkError: this process is no longer a member of the run.
        ValueError: a value has more than 64 KiB; or ``add`` finds no number.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = weakref.ref(comm)
        _kept.setdefault(comm, []).append(self)

    @property
    def _store(self) -> Store:
        comm = self._comm()
        if comm is None:
            raise dist.DistNetworkError("the communicator of this store is gone")
        return comm.store

    @property
    def _timeout_s(self) -> float:
        store: Any = self  # torch declares no ``timeout``
        return _seconds(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with _as_torch([key]):
            self._store.set(_short(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until the key exists."""
        with _as_torch([key]):
            return self._store.get(_short(key), self._timeout_s)

    def add(self, key: str, value: int) -> int:
        """Add to a number, and return the sum."""
        with _as_torch([key]):
            return self._store.add(_short(key), value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        with _as_torch([key]):
            self._store.append(_short(key), _bytes(value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if it has the expected value; return the value that it has now.

        As in torch's stores, that is ``expected_value`` if the key does not exist.
        """
        expected = _bytes(expected_value)
        with _as_torch([key]):
            found = self._store.compare_set(_short(key), expected, _bytes(desired_value))
        return expected if found is None else found

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys exist now."""
        with _as_torch(keys):
            return self._store.check(map(_short, keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys exist."""
        with _as_torch(keys):
            limit_s = self._timeout_s if timeout is None else _seconds(timeout)
            self._store.wait(map(_short, keys), limit_s)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys; wait until they exist."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set several keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        with _as_torch([key]):
            return self._store.delete(_short(key))

    def num_keys(self) -> int:
        """Return how many keys the run has, also those of other programs."""
        with _as_torch([]):
            return self._store.count()

    def has_extended_api(self) -> bool:
        """Whether ``append``, ``multi_get`` and ``multi_set`` are supported."""
        return True

    def clone(self) -> RunStore:
        """Return this store: several threads may use it at once."""
        return self

    deleteKey = delete_key
    getNumKeys = num_keys


@contextmanager
def _as_torch(keys: Iterable[str]) -> Generator[None]:
    """Raise the errors that torch's own stores raise."""
    try:
        yield
    except DeadlineExceeded as error:
        raise dist.DistStoreError(f"wait timeout, keys: {', '.join(keys)}: {error}") from error
    except (MembershipError, NotConnected) as error:
        raise dist.DistNetworkError(str(error)) from error
    except PCCLError as error:
        raise dist.DistStoreError(str(error)) from error


def _short(key: str) -> str:
    """Return a key that the run takes: of a longer one, the beginning and a hash."""
    data = key.encode()
    if len(data) <= _KEY_BYTES_MAX:
        return key
    digest = sha256(data).hexdigest()
    return data[: _KEY_BYTES_MAX - len(digest)].decode(errors="ignore") + digest


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _seconds(timeout: timedelta) -> float:
    """Return a time limit that the run takes; torch's may be 0, which is a look."""
    return max(timeout.total_seconds(), 1e-3)
