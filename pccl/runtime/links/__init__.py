"""Links to other peers: dialled, kept, measured, and given their lanes.

* ``listening``: opens the one port of a peer.
* ``keeper``: dials, accepts and closes lanes as ``LinkUpkeep`` decides.
* ``meter``: reads off the links in use what they can do. It sends nothing for that.
* ``frame_router``: hands the frames of all lanes to whom they concern.
"""
