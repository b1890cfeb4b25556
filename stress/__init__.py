"""The stress harness: runs the library under simulated and real faults, and checks the outcome.

* ``__main__``: the entry point of ``python -m pccl.stress``.
* ``commands``: the command line of ``python -m pccl.stress``, with one command per part.
* ``timeline``: a scenario file: the processes of a run, and its faults with their times.
* ``drawing``: draws a timeline from a seed: faults of all kinds, in a weighted mix.
* ``sim``: the deterministic simulation: the production runtime in virtual time, from one seed.
* ``chaos``: the harness on real processes: a run under seeded faults, every value checked.
* ``emulator``: the link emulator: a TCP proxy that makes loopback behave like a real link.
* ``studies``: measurements, each by a command: the cost of a loss, the size of the source tree.

The harness may import every other package of the project. No other package imports the harness,
except ``pccl bench``, for emulated links.
"""
