"""Which run a command is about: the run files of ``pccl launch``, and how a command finds a master.

* ``run_file``: the file in which ``pccl launch`` names its master, for commands of the same user.
* ``target``: the master and the token of a command: from arguments, environment or a run file.
* ``stacks``: the folder in which the peers of a launch put their stacks.
"""
