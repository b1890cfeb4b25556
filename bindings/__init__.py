"""Bindings: adapters that put pccl into other frameworks, built on its public API only.

* ``arguments``: what programs pass to the wrappers of a training loop, checked where it comes in.
* ``compression``: what values are reduced with, and what that has left out of them so far.
* ``events``: the events of training over ``pccl``: one dataclass for each kind.
* ``listeners``: calls several consumers with each event, and drops one that fails.
* ``event_queue``: events of one replica, kept until its listeners have time for them.
* ``consumers``: consumers of the events of a training run: a JSONL file, TensorBoard, one line on
  the terminal.
* ``status_line``: the status of a training run, in one line.
* ``diloco``: DiLoCo for PyTorch: wrap the inner optimizer, and train with peers that may come and
  go.
* ``gradient_averager``: classic data parallelism across peers: the gradients of every step are
  averaged.

This room is for the PyTorch optimizer wrapper (DiLoCo, arXiv:2311.08105) and for adapters to
training frameworks. A binding is a user of ``pccl`` like any other: it imports ``pccl``,
``pccl.aio``, ``pccl.errors`` and their like, never a machine, a transport or the runtime behind
them, so that whatever a binding can do a user's own script can do too.

No module here is named after the framework it adapts: a ``torch.py`` would hide torch from every
script that runs beside it. The framework itself is imported by the binding that needs it, never
by this file.
"""
