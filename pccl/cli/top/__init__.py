"""``pccl top``: a live view of a run in a terminal.

* ``model``: what the view knows, and how keys and answers of the master change it. Pure.
* ``view``: the lines that the view shows. Pure.
* ``keys``: turns the bytes of a terminal into keys. Pure.
* ``terminal``: takes a terminal, and gives it back on every way out.
* ``command``: the command: asks the master, reads keys, and draws.
"""
