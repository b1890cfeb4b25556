"""Bindings: adapters that put pccl into other frameworks, built on its public API only.

This room is for the PyTorch optimizer wrapper (DiLoCo, arXiv:2311.08105) and for adapters to
training frameworks. A binding is a user of ``pccl`` like any other: it imports ``pccl``,
``pccl.aio``, ``pccl.errors`` and their like, never a machine, a transport or the runtime behind
them, so that whatever a binding can do a user's own script can do too.

No module here is named after the framework it adapts: a ``torch.py`` would hide torch from every
script that runs beside it. The framework itself is imported by the binding that needs it, never
by this file.
"""
