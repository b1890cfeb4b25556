"""Lists the studies as commands for ``python -m pccl.stress``."""

from __future__ import annotations

import click

from pccl.stress.studies.house import house
from pccl.stress.studies.quality.command import quality
from pccl.stress.studies.reference import reference
from pccl.stress.studies.resend import resend
from pccl.stress.studies.storm.command import storm
from pccl.stress.studies.wan.command import wan

COMMANDS: tuple[click.Command, ...] = (house, quality, reference, resend, storm, wan)
