"""Which run a command is about: the files that name runs, and how a command finds a master.

* ``run_file``: the file in which a launch or a master names its run, for commands of the same user.
* ``target``: the master and the token of a command: from arguments, environment or a run file.
* ``plan``: the command that explains a group's plan.
* ``stacks``: the folder in which the peers of a launch put their stacks.
"""
