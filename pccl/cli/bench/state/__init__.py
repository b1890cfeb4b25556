"""``pccl bench state``: fetching, hashing and joining.

* ``command``: ``pccl bench state`` as click knows it.
* ``plan``: what ``pccl bench state`` is to measure, and whether that can be.
* ``words``: what ``pccl bench state`` tells its processes to do, and what they report.
* ``run``: from a plan of ``pccl bench state`` to figures: starts the processes, and hears them.
* ``peer``: one process of ``pccl bench state``: has contents that others fetch, or fetches them.
* ``join``: one process of the part of ``pccl bench state`` that is about joins.
* ``figures``: from what the processes of ``pccl bench state`` report to figures. Pure.
"""
