"""The run's key-value store. The master has the map; members keep what they wrote and read.

* ``entries``: the map of the master, its bounds, and the map that follows from members' reports.
* ``server``: carries out the requests of members, each once, and answers them.
* ``client``: the requests of one member, and what it keeps for another master.
"""
