"""Who may join a run: commands on the machine of the master.

* ``target``: the file with the keys of the run that a command names.
* ``token``: ``pccl token`` makes, lists and rotates tokens.
* ``expel``: ``pccl expel`` removes a member, and revokes its token.
"""
