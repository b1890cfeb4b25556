"""How a master takes up a run that had another one, and what of several masters' words counts.

* ``restart``: ``Succession``: a master that begins, waits for members to return, and goes on.
* ``origin``: what it begins with, and as whom it coordinates.
* ``standby``: which run a standby stands by for, as its masters say.
* ``vouched``: the members that a master has named.
* ``report``: what one returning peer says.
* ``footprint``: how much memory that takes.
* ``recovered``: the run that follows from all reports.
* ``recovery``: collects them, and knows when they are enough.
* ``revival``: peers as they were.
* ``majority``: whether enough members follow this master.
* ``proposals``: what is told once a majority has stored it.
* ``ratification``: ``Ratification``: what a master with standbys holds back until then.
"""
