"""An in-memory network in virtual time, with seeded faults.

* ``run_queue``: when a simulated process gets to run: at once, late, or not at all until somebody
  thaws it.
* ``pipe``: what the in-memory network is made of: events in virtual time, gates, routes and pipes.
* ``network``: an in-memory network in virtual time: many hosts in one process, everything from one
  seed.
"""
