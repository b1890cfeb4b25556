"""Proof that it holds: simulated and real trouble, and the checks that judge the outcome.

* ``__main__``: ``python -m pccl.stress``: the harness's commands.
* ``commands``: the harness's command line: ``python -m pccl.stress``, one command per part.
* ``timeline``: a scenario file: who takes part in a run, and what goes wrong in it when.
* ``drawing``: a timeline out of a seed: faults of all kinds, as many as asked for, in a weighted
  mix.
* ``sim``: the deterministic simulation: the production runtime in virtual time, from one seed.
* ``chaos``: the harness on real processes: a run under seeded trouble, every value checked.
* ``emulator``: the link emulator: a TCP relay that makes loopback behave like a real link, without
  root.
* ``studies``: questions that were measured, each by a command: what a loss costs, how large the
  source is.

Everything here may use every other room, and none of them uses this one.
"""
