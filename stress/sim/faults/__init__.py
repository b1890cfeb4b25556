"""What goes wrong in a simulated run: each fault is data, and a script that strikes.

* ``base``: what every fault is: fields that are drawn from a seed and written into a file, and a
  script that runs on a stage.
* ``phases``: how a fault waits until a process is in a phase of its life.
* ``kills``: a process is killed, as by SIGKILL, in a phase of its life; perhaps another takes its
  place.
* ``processes``: processes that stop, slow down, are interrupted, leave, or come in numbers.
* ``master``: the master dies; another incarnation, or a standby, takes up the run, or nobody does.
* ``state``: what goes wrong with shared state: liars, and what strikes while it is being fetched.
* ``garbage``: a hostile connection: a stranger sends bytes to a port of the run.
* ``connections``: one connection is reset, forgotten or stalled; or nobody can dial a process.
* ``between``: what befalls everything between a process and another one, or all others.
* ``divide``: the first master lives and is cut off from some members, in a phase of what they do
  together.
* ``corrupt``: bits flip on the way: in one portion of what arrives, or in many for a while.
* ``draws``: which faults a seed draws, and how many of each.

All are what TCP really shows: inside a connection no byte is lost, doubled or reordered. Flipped
bits, which a relay brings about, have a mix of their own.
"""
