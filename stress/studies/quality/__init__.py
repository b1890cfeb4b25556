"""Trains small models in many ways in one process, and compares their losses.

* ``variants``: the ways to train together, and the settings of each.
* ``batch``: the replicas of several runs as one batched GPT, with a row for each replica.
* ``exchange``: averages values in memory, with the library's arithmetic and without a network.
* ``replica``: one replica, driven by the production classes of ``pccl.bindings.diloco``.
* ``trainer``: trains several runs as one batch, and evaluates their models.
* ``statistics``: paired differences with intervals, and the best settings of a sweep.
* ``results``: finished runs as lines of JSON.
* ``speeds``: what a slow peer costs the others, measured with real processes.
* ``command``: the commands ``quality sweep`` and ``quality grid``.

Model, text and inner optimizers are those of ``examples/train_gpt.py``. Only the network is
replaced: a real run that computes its gradients with ``batch`` ends with the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

_EXAMPLES = str(Path(__file__).resolve().parents[3] / "examples")
if _EXAMPLES not in sys.path:
    sys.path.append(_EXAMPLES)
