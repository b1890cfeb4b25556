"""Questions that were measured, each by a command: what loss, churn, patience and compression cost.

* ``commands``: the studies among the commands of ``python -m pccl.stress``, where there are any.
* ``resend``: what a loss costs: bytes that survivors send after a member died in the middle of a
  reduce.
* ``patience``: nobody is removed for being slow: peers with default deadlines on a machine that is
  overloaded.
* ``house``: how large the house is, and how far one call goes in it.
* ``hashing``: how fast shared state is hashed, beside the hash itself with all processors.
* ``training_cost``: what ``DiLoCo`` costs the training thread: steps per second beside peers that
  are silent.
* ``training_peer``: one peer of ``python -m pccl.stress training``: makes steps, and tells what
  they took.
* ``gpt_options``: options of the commands that run ``examples/train_gpt.py``.
* ``churn``: real training under churn: processes of ``examples/train_gpt.py`` are killed, and
  others come.
* ``churn_figures``: what the logs of a run under churn say: whose steps are in it, and after how
  many tokens.
* ``quality``: what training together costs in quality: every mode of ``examples/train_gpt.py``,
  side by side.
* ``quality_grid``: what ``python -m pccl.stress quality`` trains: ways to train together, and how
  they are told.
* ``quality_figures``: what the runs of ``python -m pccl.stress quality`` have shown: losses,
  intervals, bytes.

They are no part of the wheel.
"""
