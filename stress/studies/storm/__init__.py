"""Storms: a small GPT is trained while faults strike, with real processes or in the simulator.

* ``storm``: a schedule of faults, and how the replicas train under it; one file for both forms.
* ``schedules``: the published schedules, and our own, for any number of replicas.
* ``tape``: what the replicas report, in both forms.
* ``figures``: the figures of a storm, from its tape. Pure.
* ``work``: what the replicas compute: a small GPT on real text.
* ``simulated``: a storm in the simulator, with the production engine and wrapper.
* ``real``: a storm with real processes, by the harness of ``stress run``.
* ``replica_process``: a replica of it: an ordinary program that trains with ``DiLoCo``.
* ``frames``: the state of each replica at a time, and what a picture shows. Pure.
* ``page``: a page with the figures and plots.
* ``picture``: a moving picture of the replicas.
* ``command``: the command ``storm``.
"""

from __future__ import annotations

import sys
from pathlib import Path

_EXAMPLES = str(Path(__file__).resolve().parents[3] / "examples")
if _EXAMPLES not in sys.path:
    sys.path.append(_EXAMPLES)
