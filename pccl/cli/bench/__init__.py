"""``pccl bench`` measures how fast the library is on this machine or between hosts.

* ``command``: the click commands ``pccl bench`` and ``pccl bench allreduce``.
* ``machine``: describes the machine for the output, and measures memory.
* ``plan``: the plan of ``pccl bench allreduce``, and a check that this machine can measure it.
* ``run``: runs tasks on this machine: starts a master, workers, and proxies for emulated links.
* ``hosts``: ``pccl bench --master``: this process is one peer of a benchmark between hosts.
* ``peer``: one peer of ``pccl bench allreduce``: plays the rounds, and gathers the measurements.
* ``values``: the values that a benchmark reduces, and checks of the results.
* ``gloo``: the all-reduce of Gloo, for comparison. No other module here imports torch.
* ``namespace``: a network namespace, where Gloo's sockets get the congestion control of ours.
* ``ring``: a bare ring of blocking sockets and NumPy, for comparison.
* ``statistics``: computes the figures of a case from the measurements of all peers. Pure.
* ``view``: the output of ``pccl bench``: a line for each case, or JSON objects.
* ``state``: ``pccl bench state`` measures downloads of shared state, and joins.
"""
