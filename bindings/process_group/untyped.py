"""Modules of torch that it types in part only."""

from __future__ import annotations

from typing import Any

import torch.distributed
import torch.futures

dist: Any = torch.distributed
futures: Any = torch.futures
