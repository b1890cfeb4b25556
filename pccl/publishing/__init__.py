"""Reads, from outside a run, the versions of shared state that its members publish.

* ``subscriber``: ``Subscriber``, and the versions that it returns.
"""

from __future__ import annotations

from pccl.publishing.subscriber import Subscriber as Subscriber
from pccl.publishing.subscriber import Version as Version

__all__ = ["Subscriber", "Version"]
