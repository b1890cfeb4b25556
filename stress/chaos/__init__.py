"""The harness on real processes: a run under seeded trouble, every value checked.

``pccl stress run`` starts a master and peers as processes, puts an emulated link between every two
of them, carries out a timeline of faults (:mod:`pccl.stress.timeline`) and judges what the peers
report. Who does what:

* ``inputs``: what is reduced when, and what must come out of it.
* ``peer_process``, ``master_process``: the processes; each reports JSON lines (``events``).
* ``network``: a relay before each door, and which faults lie on which.
* ``crew``: starts, stops, freezes and kills the processes.
* ``trouble``: carries out the timeline.
* ``record``, ``judge``: what was heard, and what is wrong with it.
* ``view``, ``report``, ``plots``: how it is shown, while it runs and afterwards.
* ``namespaces``: the same in network namespaces with rates that the kernel keeps.
* ``run``, ``command_line``: all of it together.
* ``recovery``: how long it takes until the survivors of a kill have their result.
"""
