"""``init_process_group("pccl")``: a backend of torch.distributed that outlives its members.

* ``registration``: tells torch about the backend; torch calls it by an entry point.
* ``rendezvous``: joins the run; which peer has which rank.
* ``team``: the live members of one process group, of which some may be lost.
* ``promise``: ``Work`` and ``Future`` of torch, whose outcome a thread of ours sets.
* ``flight``: one collective, from its start to its outcome, as a torch ``Work``.
* ``gradients``: the all-reduces of one backward pass, over the same contributors.
* ``identity``: who a process group is, as torch asks for it.
* ``group``: the process group: torch's collectives in terms of ours.
* ``creation``: makes a process group when torch asks for one.
* ``arguments``: torch's operations, dtypes and buffers in terms of ours.
* ``ddp``: the communication hook for DDP.
* ``reconfigure``: new ranks after losses, newcomers, and their state.
* ``store``: torch's ``Store``, kept by the run.
* ``untyped``: modules of torch that it types in part only.
"""
