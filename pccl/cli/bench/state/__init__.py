"""``pccl bench state`` measures downloads of shared state, and joins.

* ``command``: the click command ``pccl bench state``.
* ``figures``: computes figures from the measurements of all processes. Pure.
* ``peer``: one process of ``pccl bench state``: a source of the state, or a joiner.
"""
