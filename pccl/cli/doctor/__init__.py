"""``pccl doctor`` checks whether this machine is fit for a run, and shows what to change.

* ``facts``: what the doctor knows of a machine, of its path to a master, and of a run.
* ``checks``: pure: facts go in, findings come out: ok, warn or fail, and the remedy. For a machine.
* ``path_checks``: the same for the path to a master.
* ``link_checks``: the same for what others see of this machine, and the links that follow from it.
* ``run_checks``: the same for the answers of a master and of members.
* ``network``: sockets: routes, connections, their options, and the speed of the loopback.
* ``gather``: collects the facts.
* ``findings_view``: prints findings: coloured on a terminal, plain lines or JSON elsewhere.
* ``command``: the click command.
"""
