"""The studies among the commands of ``python -m pccl.stress``, where there are any."""

from __future__ import annotations

import click

from pccl.stress.studies.churn import churn
from pccl.stress.studies.house import house
from pccl.stress.studies.patience import patience
from pccl.stress.studies.quality import quality
from pccl.stress.studies.resend import resend
from pccl.stress.studies.training_cost import training

COMMANDS: tuple[click.Command, ...] = (churn, house, patience, quality, resend, training)
