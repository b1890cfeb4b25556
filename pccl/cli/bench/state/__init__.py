"""``pccl bench state``: fetching and joining.

* ``command``: ``pccl bench state`` as click knows it.
* ``figures``: from what the processes of ``pccl bench state`` have seen to figures. Pure.
* ``peer``: one process of ``pccl bench state``: has contents that others fetch, or fetches them.
"""
