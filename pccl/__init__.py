"""Fault-tolerant collectives for processes that join and leave, over any network.

    import pccl
    with pccl.Communicator("127.0.0.1:48148") as comm:
        comm.connect(min_peers=2)                         # returns when admitted
        info = comm.all_reduce(x, op=pccl.ReduceOp.AVG)   # in place unless recv= is given

Names are loaded when they are first used, so that ``import pccl`` takes little time.

Public modules:

* ``communicator``: the blocking API.
* ``aio``: the asyncio API, with the same calls.
* ``shared_state``: named tensors and a revision, equal on all members of a group.
* ``checkpoint``: checkpoint files of shared state, with digests of their contents.
* ``descriptors``: options and descriptions of a reduce.
* ``error_feedback``: adds the quantization error of a reduce to the next reduce.
* ``master_node``: the master as an object.
* ``publishing``: reads, from outside a run, the versions of shared state that members publish.
* ``inquiry``: asks a master for the status of its run.
* ``progress``: shows the progress of a fetch of shared state.
* ``errors``: the errors of the library.
* ``config``: reads settings from environment variables.
* ``addresses``: parses addresses such as ``host:port``.
* ``checks``: checks of plain arguments.
* ``cuda``: support for tensors on CUDA devices.
* ``observe``: shows what happens in a run: logs, metrics, recordings.
* ``bindings``: adapters to training frameworks.
* ``torch``: what programs for torch.distributed import.
* ``cli``: the command line.

Internal packages, of which none imports a later one:

* ``protocol``: the vocabulary, and the messages and frames on the wire.
* ``collectives``: the schedules, the arithmetic and the wire formats of collectives.
* ``topology``: measured links, and the choice of an algorithm.
* ``state``: shared state: digests, election, fetching.
* ``telemetry``: what people and tools learn about a run.
* ``machines``: state machines of master and peer, which make all decisions.
* ``transports``: connections that move bytes.
* ``runtime``: event loops, timers and threads; it carries out the decisions.
* ``_api``: code that the blocking and the asyncio API share.
* ``stress``: simulator, chaos tests and network emulator.
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
    from pccl._api.reports import Attribute
    from pccl._api.reports import MemberInfo as MemberInfo
    from pccl.communicator import Communicator
    from pccl.descriptors import DeviceType as DeviceType
    from pccl.descriptors import (
        DistributionHint,
        QuantizationAlgorithm,
        QuantizationOptions,
        ReduceDescriptor,
        ReduceOpDescriptor,
        ReduceOperandDescriptor,
    )
    from pccl.descriptors import Guard as Guard
    from pccl.error_feedback import ErrorFeedback as ErrorFeedback
    from pccl.errors import PCCLError
    from pccl.errors import Result as Result
    from pccl.inquiry import MasterStatus as MasterStatus
    from pccl.inquiry import master_status as master_status
    from pccl.master_node import MasterNode
    from pccl.protocol.data_type import DataType
    from pccl.protocol.guards.contributions import GuardAction as GuardAction
    from pccl.protocol.limits import Timing as Timing
    from pccl.protocol.types import ReduceOp
    from pccl.protocol.types import WireFormat as WireFormat
    from pccl.publishing.subscriber import Subscriber as Subscriber
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
    "pccl.communicator": ("Communicator", "Subgroup"),
    "pccl.descriptors": (
        "DeviceType",
        "DistributionHint",
        "Guard",
        "QuantizationAlgorithm",
        "QuantizationOptions",
        "ReduceDescriptor",
        "ReduceOpDescriptor",
        "ReduceOperandDescriptor",
    ),
    "pccl.protocol.guards.contributions": ("GuardAction",),
    "pccl.error_feedback": ("ErrorFeedback",),
    "pccl.errors": ("PCCLError", "Result"),
    "pccl._api.handles": ("AsyncReduceHandle",),
    "pccl.inquiry": ("MasterStatus", "master_status"),
    "pccl.master_node": ("MasterNode",),
    "pccl.publishing.subscriber": ("Subscriber",),
    "pccl.protocol.limits": ("Timing",),
    "pccl.protocol.data_type": ("DataType",),
    "pccl.protocol.types": ("ReduceOp", "WireFormat"),
    "pccl._api.reports": ("Attribute", "MemberInfo"),
    "pccl.runtime.requests": ("ReduceInfo", "SharedStateSyncInfo"),
    "pccl.runtime.state.replay": ("ObservedReduction",),
    "pccl.runtime.state.progress": ("SyncProgress",),
    "pccl.shared_state": ("SharedState", "SharedStateSyncStrategy", "TensorInfo"),
}
_HOMES = {name: home for home, names in _NAMES_OF_HOMES.items() for name in names}
_MODULES = ("aio", "cuda", "errors", "progress")
"""Modules that ``import pccl`` makes available as attributes."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"pccl.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise _unknown(name)
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_MODULES, "__version__"})


def _unknown(name: str) -> AttributeError:
    """Return the error for a name that does not exist; it suggests a similar one."""
    from difflib import get_close_matches

    by_lower_case = {known.lower(): known for known in __dir__()}
    similar = get_close_matches(name.lower(), by_lower_case, n=1)
    hint = f"; did you mean {by_lower_case[similar[0]]}?" if similar else ""
    # Without an object, because the interpreter would add a suggestion of its own.
    return AttributeError(f"module 'pccl' has no attribute {name!r}{hint}", name=name, obj=None)
