"""The harness on real processes: a run under seeded trouble, every value checked.

* ``settings``: what a run consists of, and the deadlines that follow from its one deadline.
* ``inputs``: what the peers reduce, and what must come out: all follows from the seed, and nothing
  is rounded.
* ``events``: what the processes of a run tell the harness: one JSON object a line, with the time of
  it.
* ``peer_process``: one peer under trouble: reduces for ever, checks every bit, and tells the
  harness.
* ``master_process``: the master of a run under trouble. It tells the harness what it announces of
  peers.
* ``garbage``: hostile bytes on a port: what scanners, broken programs and bad people send.
* ``network``: the network of a run: a relay before each door, and the faults that lie on it at the
  moment.
* ``namespaces``: where the processes run: all on loopback, or each in a network namespace with a
  real rate.
* ``crew``: the processes of a run: started, heard, frozen, killed. None is left when the block
  ends.
* ``trouble``: carries out a timeline: each fault at its time, and its end at its end.
* ``run``: a whole run: start, trouble, calm, end. However it ends, no process is left.
* ``view``: what is shown while a run lasts: a live picture on a terminal, lines when piped.
* ``command_line``: ``python -m pccl.stress run``: the harness as a command.
* ``verdict``: what was heard of a run, and what is wrong with it.
* ``recovery``: how long it takes until the survivors of a kill have their result.

``pccl stress run`` starts a master and peers as processes, puts an emulated link between every two
of them, carries out a timeline of faults (``timeline``) and judges what the peers report.
"""
