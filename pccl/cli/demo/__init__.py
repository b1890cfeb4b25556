"""``pccl demo``: a small network is trained by processes of which one is killed half-way.

* ``command``: ``pccl demo``: starts the processes, kills one, lets another one join half-way.
* ``peer``: one process: a network that learns digits, its gradients averaged with the others'.
* ``record``: what the processes do and tell, what becomes of it, and the judgement at the end.
* ``view``: what the demo shows: a row with a bar for each process; words; and a picture.
"""
