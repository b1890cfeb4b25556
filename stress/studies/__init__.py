"""Questions that were measured, each by a command: what a loss costs, how large the source is.

* ``commands``: the studies among the commands of ``python -m pccl.stress``, where there are any.
* ``resend``: what a loss costs: bytes that survivors send after a member died in the middle of a
  reduce.
* ``house``: how large the house is, and how far one call goes in it.
* ``reference``: writes ``docs/protocol/messages.md`` and ``limits.md`` from the code.

They are no part of the wheel.
"""
