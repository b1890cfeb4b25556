"""``pccl demo`` trains a small network with several processes, and kills one half-way.

* ``command``: the command: starts the processes, kills one, and lets another one join half-way.
* ``peer``: one process, which trains a network on digits and averages its gradients.
* ``record``: the tasks and reports of the processes, the record of a demo, and its verdict.
* ``view``: the output: a progress bar for each process, lines of text, and a picture.
"""
