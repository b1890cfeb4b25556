"""Proof that it holds: simulated and real trouble, and the checks that judge the outcome.

Everything here may use every other room, and none of them uses this one.

* ``sim``: the production code on an in-memory network in virtual time, one seed per run.
* ``chaos``: real processes under the same faults, each value checked (``pccl stress run``).
* ``timeline``, ``drawing``: which faults, when: a file that drives both, or a seed.
* ``emulator``: a TCP relay that makes loopback behave like a real link, and breaks it at will.
"""
