"""Measurements, each by a command: the cost of a loss, the size of the source tree, quality.

* ``commands``: lists the studies as commands for ``python -m pccl.stress``.
* ``resend``: measures the bytes that survivors send after a member dies in a reduce.
* ``house``: measures the size of the source tree, and the Python calls of one all-reduce.
* ``quality``: trains small models in many ways in one process, and compares their losses.
* ``storm``: trains under a schedule of faults, and measures what they cost.
* ``wan``: compares plans of all-reduces over an emulated wide-area network.
* ``torch_conformance``: runs torch's own distributed tests with another backend.
* ``reference``: writes the lists in ``docs/protocol`` from the code.

The wheel does not contain the studies.
"""
