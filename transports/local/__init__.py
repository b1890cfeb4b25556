"""Links between processes of one machine, which copy segments from each other's memory.

* ``socket_owner``: finds out which process of this machine holds the other end of a connection.
* ``process_memory``: processes of one machine copy segments from each other's memory.
"""
