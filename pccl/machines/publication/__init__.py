"""Published versions of shared state: the parts of the master, of members and of readers.

* ``tracker``: the part of the master: which version counts, and which processes have it.
* ``announcer``: the part of a member: which versions it publishes.
* ``reader``: the machine of a reader: which master and peers it dials, and what it fetches.
"""
