"""Links and what follows from them, pure: their speed, their health, and the quickest way round.

* ``link_measures``: what members have measured.
* ``cost_model``: how long an all-reduce takes as a ring, a star or a mesh, and the table of sizes
  that follows from it.
* ``ring_order``: an order in which all neighbours can talk.
* ``link_upkeep``: which lanes of which links a peer dials and closes, and when.
* ``link_damage``: when a line that changes bytes counts as down.
"""
