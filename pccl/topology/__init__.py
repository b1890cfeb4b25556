"""Which way is the quickest: pure functions of what members have measured of their links.

* ``cost_model``: how long an all-reduce takes as a ring, a star or a mesh, and the table of sizes
  that follows from it.
"""
