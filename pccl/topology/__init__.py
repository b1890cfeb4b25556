"""Links between peers, pure: their speed, their health, and the choices that depend on them.

* ``link_measures``: the latencies and speeds that members have measured.
* ``shares``: how much of a tensor each member owns in the fastest mesh.
* ``cost_model``: how long an all-reduce takes as a ring, a star or a mesh.
* ``planner``: the fastest algorithm for each size of tensor, and the shares of a mesh.
* ``ring_order``: an order of the members in which all neighbours have links.
* ``link_steps``: what ``link_upkeep`` wants to be done.
* ``wanted_link``: what is known of one link, and how many lanes it gets.
* ``link_upkeep``: which lanes of which links a peer dials and closes, and when.
* ``relay_pairs``: which connections of other peers a relay joins, and when it ends them.
* ``lane_watch``: detects lanes that owe progress and make none.
* ``segment_limit``: finds links on which large packets vanish, and gives them smaller segments.
* ``tracer``: which process may read the memory of this one.
* ``link_damage``: when a link that damages data counts as down.
"""
