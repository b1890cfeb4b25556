"""Fault-tolerant collectives for processes that join and leave, over any network.

    import pccl
    with pccl.Communicator("127.0.0.1:48148") as comm:
        comm.connect()                                    # returns when admitted
        while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < 2:
            comm.update_topology()
        info = comm.all_reduce(x, op=pccl.ReduceOp.AVG)   # in place unless recv= is given

Names are loaded when they are first used, so that ``import pccl`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccl.communicator import Communicator, ReduceInfo
    from pccl.errors import PCCLError
    from pccl.errors import Result as Result
    from pccl.master_node import MasterNode
    from pccl.protocol.limits import Timing as Timing
    from pccl.protocol.types import Attribute, DataType, ReduceOp

__version__ = "0.1.0"

__all__ = [
    "Attribute",
    "Communicator",
    "DataType",
    "MasterNode",
    "PCCLError",
    "ReduceInfo",
    "ReduceOp",
]

_HOMES = {
    "Attribute": "pccl.protocol.types",
    "Communicator": "pccl.communicator",
    "DataType": "pccl.protocol.types",
    "MasterNode": "pccl.master_node",
    "PCCLError": "pccl.errors",
    "ReduceInfo": "pccl.communicator",
    "ReduceOp": "pccl.protocol.types",
    "Result": "pccl.errors",
    "Timing": "pccl.protocol.limits",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pccl' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
