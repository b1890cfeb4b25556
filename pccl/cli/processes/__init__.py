"""``pccl launch`` and ``pccl join``, and the child processes of all commands.

* ``launch``: ``pccl launch`` runs a master and several peers on this machine, in one terminal.
* ``join``: ``pccl join`` waits for the master of a run, then becomes one peer of this run.
* ``programs``: finds a program by its name, and reports errors as shells do.
* ``children``: the child processes of a command: starts them, reads their output, ends all of them.
* ``guard``: two small programs that keep a command's children from outliving it.
* ``lines``: splits the output of a process into lines.
* ``crew``: the worker processes of one command: Python programs that have names and write lines.
* ``reports``: the reports of worker processes: a dataclass on each line of stdout, as JSON.
* ``proxies``: proxies that emulate links: worker processes, one in front of each target.
* ``peer_output``: prints the output of peers line by line, with the peer's name before each line.
"""
