"""``pccl bench``: how fast the library is on this machine, and beside what.

* ``command``: ``pccl bench`` as click knows it: reads the command line, says what was found.
* ``machine``: the machine, as it is named beside every figure, and its memory.
* ``plan``: what ``pccl bench allreduce`` is to measure, and whether that can be.
* ``run``: from tasks to figures on this machine: a master, relays if links are emulated, and
  workers.
* ``hosts``: ``pccl bench --master``: this process is one peer of a benchmark across hosts.
* ``peer``: one peer of ``pccl bench allreduce``: plays the rounds, and tells what all peers have
  measured.
* ``values``: the values that a benchmark reduces, and whether the results are right.
* ``gloo``: the other side of a comparison: Gloo, as it comes with torch. Only this module imports
  torch.
* ``statistics``: from what the peers have measured to the figures of a case. Pure.
* ``view``: what ``pccl bench`` shows: lines, each as soon as it is known, or JSON objects.
* ``state``: ``pccl bench state``: fetching and joining.
"""
