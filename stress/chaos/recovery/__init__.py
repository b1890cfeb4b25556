"""How long it takes until the survivors of a kill have their result.

* ``command``: ``python -m pccl.stress recovery``: from the SIGKILL of a peer to the survivors'
  result.
* ``peer``: one peer of the measurement of recovery: a survivor, or the one that dies in a reduce.
"""
