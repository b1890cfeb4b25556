"""Faults of a simulated run: each is a dataclass with a script that carries it out.

* ``base``: base classes of faults; a seed draws their fields, and a file can store them.
* ``phases``: lets a fault wait until a process is in a phase of its life.
* ``kills``: kills a process in a phase of its life; perhaps a new process takes its place.
* ``processes``: faults of processes: they stop, slow down, are interrupted, leave, or join.
* ``master``: kills the master; a new master, a standby or neither takes its place.
* ``state``: faults of shared state: liars, and faults that strike during a fetch.
* ``narrowing``: faults that strike when an operation goes on without some members.
* ``garbage``: a hostile connection: a stranger sends bytes to a port of the run.
* ``connections``: faults of one connection, and processes that no other process can dial.
* ``between``: faults of all connections between one process and another, or all others.
* ``divide``: cuts a living first master off from some members, in a phase of their work.
* ``corrupt``: flips bits in one portion of arriving data, or in many for a while.
* ``draws``: which kinds of fault a seed draws, and how many of each.

All faults can happen to real TCP connections: no connection loses, doubles or reorders a byte.
Flipped bits, which a relay may cause, have their own mix.
"""
