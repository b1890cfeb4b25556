"""Links to other peers: dialled, kept, measured, and given as many lanes as they are worth.

* ``listening``: opens the one port of a peer.
* ``dialling``: the state of the dials of one peer: links that it wants, and the lanes of each.
* ``keeper``: keeps the links to other peers: of two peers the younger dials at once, the elder a
  little later.
* ``meter``: reads off the links in use what they can do. It sends nothing for that.
* ``lane_tuner``: watches one link at work and tells how many lanes this side should send on; see
  ``lane_count``.
* ``frame_router``: hands the frames of all lanes to whom they concern.
"""
