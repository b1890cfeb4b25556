"""Links to other peers: dialled, kept, measured, and given their lanes.

* ``listening``: opens the one port of a peer.
* ``dialling``: the dials of one peer: links that it wants, the lanes of each, and how many those
  should be.
* ``keeper``: keeps the links to other peers: of two peers the younger dials at once, the elder a
  little later.
* ``meter``: reads off the links in use what they can do. It sends nothing for that.
* ``frame_router``: hands the frames of all lanes to whom they concern.
"""
