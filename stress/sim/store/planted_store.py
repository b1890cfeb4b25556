"""A planted bug of the run's store; see :mod:`pccl.stress.sim.planted`."""

from __future__ import annotations

from pccl.machines.key_value.client import StoreClient
from pccl.stress.sim.planting import says

says("store_not_reported", StoreClient, "report", ())
