"""The chaos harness: it runs real processes under seeded faults, and checks every value.

* ``settings``: the settings of a run, and the deadlines that follow from its one deadline.
* ``inputs``: inputs and expected results of the peers: the seed gives both, without rounding.
* ``events``: events that the processes of a run report to the harness, as JSON lines.
* ``peer_process``: a peer: reduces in a loop, checks every bit, and reports to the harness.
* ``master_process``: the master: reports each announcement about a peer to the harness.
* ``garbage``: sends hostile bytes to a port, as scanners, broken programs and attackers do.
* ``network``: the network of a run: proxies in front of each peer, and the faults on them.
* ``namespaces``: where the processes run: all on loopback, or each in a network namespace.
* ``crew``: starts, reads, stops and kills the processes of a run.
* ``trouble``: carries out a timeline: begins and ends each fault at its time.
* ``run``: a whole run: start, faults, calm, end. However it ends, no process is left.
* ``view``: shows a run while it lasts: a live table on a terminal, otherwise lines.
* ``command_line``: ``python -m pccl.stress run``: the harness as a command.
* ``verdict``: the record of a run, its judgement, and the report on it.
* ``recovery``: measures how long the survivors of a kill wait for their result.

``pccl stress run`` starts a master and peers as processes, with an emulated link between any two.
It carries out a timeline of faults (``timeline``), and judges what the peers report.
"""
