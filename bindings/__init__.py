"""Bindings: adapters for other frameworks, built on pccl's public API only.

* ``arguments``: checks the arguments of the wrappers of a training loop.
* ``compression``: the wire format of the reduces, with its error feedback.
* ``schedulers``: finds learning-rate schedulers that begin at step 0 in a run that is further; or
  brings them to the run's step.
* ``interrupts``: defers Ctrl-C while a model is being updated.
* ``tensors``: helpers for the tensors of a model: parts of sharded tensors, and names.
* ``events``: the events of training over ``pccl``: one dataclass for each kind.
* ``event_queue``: keeps the events of a replica until it calls the listeners.
* ``consumers``: consumers of the events of a training run: a JSONL file, TensorBoard, one line on
  the terminal.
* ``trackers``: consumers for Weights & Biases, MLflow and OpenTelemetry.
* ``status_line``: the status of a training run, in one line.
* ``data``: gives each peer of a run samples of its own: each sample once, and none lost.
* ``diloco``: DiLoCo for PyTorch: wrap the inner optimizer, and train with peers that may join and
  leave.
* ``gradient_averager``: classic data parallelism across peers: the gradients of every step are
  averaged.
* ``process_group``: a backend of torch.distributed that outlives its members.
* ``ray``: Ray starts, places and replaces the peers of a run; and a backend of its collectives.
* ``trainers``: callbacks with which the trainers of other libraries follow a run of ``DiLoCo``.

A binding uses ``pccl`` as any program does. It imports only public modules, such as ``pccl.aio``
and ``pccl.errors``, and never a machine, a transport or the runtime. So a user's own script can do
all that a binding can do.

No file here has the name of a framework: a ``torch.py`` would hide torch from every script in the
same folder. A binding imports the framework that it needs; this file imports none.
"""
