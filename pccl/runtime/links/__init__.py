"""Dials, keeps and measures the links to other peers, and routes their frames.

* ``listening``: opens the one port of a peer.
* ``port_mapping``: asks the router to forward that port.
* ``upnp``: asks it in UPnP, by a library.
* ``keeper``: dials, accepts and closes lanes as ``LinkUpkeep`` decides.
* ``introductions``: asks relays for the addresses that a simultaneous open needs.
* ``lane_checks``: finds lanes that make no progress, and replaces them.
* ``meter``: measures the links from the traffic that they carry. It sends nothing itself.
* ``pulls``: finds out with which peers this process can share memory, and proves it.
* ``relay``: joins the connections of two peers that cannot dial each other.
* ``frame_router``: passes frames to the collectives, the shared state or the pulls.
"""
