"""The deciders, pure: an event and the time go in, effects come out in the order of doing them.

* ``machine``: what the two machines share.
* ``history``: the bounded story that each keeps, and prints when it fails.
* ``ticks``: whether a machine's own clock stood still, so that silence proves nothing.
* ``reachability``: who can be dialled, and at which addresses others may be asked to dial.
* ``repair``: how a ring goes on without those that it has lost.
* ``batch``: after which error a reduce is made again, and several reduces as one call.
* ``peer``: one process's part in a run.
* ``master``: who coordinates a run.
"""
