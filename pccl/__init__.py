"""Fault-tolerant collectives for processes that join and leave, over any network.

    import pccl
    with pccl.Communicator("127.0.0.1:48148") as comm:
        comm.connect(min_peers=2)                         # returns when admitted
        info = comm.all_reduce(x, op=pccl.ReduceOp.AVG)   # in place unless recv= is given

Names are loaded when they are first used, so that ``import pccl`` costs next to nothing.

What users import:

* ``communicator``: the blocking API.
* ``aio``: the same calls, awaitable on the caller's loop.
* ``shared_state``: named tensors with a revision that all members of a group hold alike.
* ``checkpoint``: files of shared state that prove they are whole.
* ``descriptors``: what a caller may say about a reduce.
* ``error_feedback``: what quantization leaves out of one reduce is added to the next.
* ``master_node``: the master as an object.
* ``inquiry``: how a run stands, asked of its master.
* ``progress``: how far a fetch of shared state is, on a terminal.
* ``errors``: the errors of the library.
* ``config``: what the environment says where an argument is not given.
* ``addresses``: ``host:port`` as people write it.
* ``checks``: checks of plain arguments.
* ``cuda``: tensors in the memory of CUDA devices.
* ``bindings``: adapters to training frameworks.
* ``cli``: the command line.

What it is made of, from the vocabulary up:

* ``protocol``: the vocabulary and the wire.
* ``collectives``: who sends what when, and the arithmetic.
* ``topology``: links, and the quickest way round.
* ``state``: shared state: digests, election, fetching.
* ``machines``: the deciders.
* ``transports``: moving bytes.
* ``runtime``: the shell, which carries out.
* ``_api``: what both faces share.
* ``stress``: proof that it holds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccl import aio as aio
    from pccl import cuda as cuda
    from pccl import errors as errors
    from pccl import progress as progress
    from pccl._api.handles import AsyncReduceHandle
    from pccl._api.reports import MemberInfo as MemberInfo
    from pccl.communicator import Communicator
    from pccl.descriptors import DeviceType as DeviceType
    from pccl.descriptors import (
        DistributionHint,
        QuantizationOptions,
        ReduceDescriptor,
        ReduceOpDescriptor,
        ReduceOperandDescriptor,
    )
    from pccl.error_feedback import ErrorFeedback as ErrorFeedback
    from pccl.errors import PCCLError
    from pccl.errors import Result as Result
    from pccl.inquiry import MasterStatus as MasterStatus
    from pccl.inquiry import master_status as master_status
    from pccl.master_node import MasterNode
    from pccl.protocol.data_type import DataType
    from pccl.protocol.limits import Timing as Timing
    from pccl.protocol.types import Attribute, QuantizationAlgorithm, ReduceOp
    from pccl.protocol.types import WireFormat as WireFormat
    from pccl.runtime.requests import ReduceInfo, SharedStateSyncInfo
    from pccl.runtime.state.progress import SyncProgress as SyncProgress
    from pccl.runtime.state.replay import ObservedReduction as ObservedReduction
    from pccl.shared_state import SharedState, SharedStateSyncStrategy, TensorInfo

__version__ = "0.1.0"

__all__ = [
    "AsyncReduceHandle",
    "Attribute",
    "Communicator",
    "DataType",
    "DistributionHint",
    "MasterNode",
    "PCCLError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "TensorInfo",
    "cuda",
]

_NAMES_OF_HOMES = {
    "pccl.communicator": ("Communicator",),
    "pccl.descriptors": (
        "DeviceType",
        "DistributionHint",
        "QuantizationOptions",
        "ReduceDescriptor",
        "ReduceOpDescriptor",
        "ReduceOperandDescriptor",
    ),
    "pccl.error_feedback": ("ErrorFeedback",),
    "pccl.errors": ("PCCLError", "Result"),
    "pccl._api.handles": ("AsyncReduceHandle",),
    "pccl.inquiry": ("MasterStatus", "master_status"),
    "pccl.master_node": ("MasterNode",),
    "pccl.protocol.limits": ("Timing",),
    "pccl.protocol.data_type": ("DataType",),
    "pccl.protocol.types": (
        "Attribute",
        "QuantizationAlgorithm",
        "ReduceOp",
        "WireFormat",
    ),
    "pccl._api.reports": ("MemberInfo",),
    "pccl.runtime.requests": ("ReduceInfo", "SharedStateSyncInfo"),
    "pccl.runtime.state.replay": ("ObservedReduction",),
    "pccl.runtime.state.progress": ("SyncProgress",),
    "pccl.shared_state": ("SharedState", "SharedStateSyncStrategy", "TensorInfo"),
}
_HOMES = {name: home for home, names in _NAMES_OF_HOMES.items() for name in names}
_MODULES = ("aio", "cuda", "errors", "progress")
"""Modules that come with ``import pccl``."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"pccl.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pccl' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
