"""What a seed means, and how it is kept, replayed and reduced.

* ``scenario``: what a seed means: the options of one simulated run, all drawn from it.
* ``mixes``: the mixes of the simulator: what seeds draw, and what enough of them must not miss.
* ``file``: scenarios as JSON, so that a reduced one can be kept and replayed.
* ``from_timeline``: a timeline, the scenario file of the harness on real processes, as a simulated
  scenario.
* ``shrink``: makes a failing scenario smaller while it fails in the same way.
"""
