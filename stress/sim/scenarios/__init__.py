"""Scenarios: what a seed draws, and how a scenario is stored, replayed and reduced.

* ``scenario``: the options of one simulated run, all drawn from a seed.
* ``to_train``: scenarios in which processes train.
* ``naps``: scenarios in which members nap, and the others go on without them.
* ``mixes``: the mixes of the simulator: what seeds draw, and which faults must strike.
* ``file``: stores scenarios as JSON, so that a reduced one can be replayed.
* ``from_timeline``: turns a timeline, the scenario file of the harness, into a scenario.
* ``shrink``: makes a failing scenario smaller while it fails in the same way.
"""
