"""Commands that start other programs, and never leave one behind.

* ``launch``: ``pccl launch``: a master and several peers on this machine, in one terminal.
* ``join``: ``pccl join``: become one peer of a run whose master is elsewhere, as soon as it is
  there.
* ``programs``: which file a command's name stands for, found and complained about as shells do.
* ``children``: processes that a command starts, listens to and ends; it leaves none behind, however
  it ends.
* ``guard``: two small programs that keep a command's children from outliving it, however it ends.
* ``lines``: lines out of whatever a process writes, as it comes.
* ``crew``: worker processes of one command, by name: Python programs that write lines.
* ``reports``: what worker processes report: a dataclass on each line of their stdout, as a JSON
  object.
* ``relays``: emulated links: relays, as worker processes, before where others listen.
* ``peer_output``: what peers write, passed on line by line with the peer's number before it.
"""
