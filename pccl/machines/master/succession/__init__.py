"""How a master continues the run of an earlier one, and which of several masters may move a run.

* ``restart``: ``Succession``: a master starts, waits for members to return, and continues.
* ``origin``: what a master knows when it starts, and its identity.
* ``standby``: which run a standby may continue, by the answers of its masters.
* ``vouched``: the members that a master has named.
* ``report``: the report of one returning peer.
* ``footprint``: how much memory a report takes.
* ``recovered``: the run that follows from all reports.
* ``recovery``: collects the reports, and decides when they are enough.
* ``revival``: registers returning peers as the earlier master had them.
* ``majority``: whether enough members follow this master.
* ``proposals``: finals that a majority has to store before the master sends them.
* ``ratification``: ``Ratification``: what a master with standbys sends only with a majority.
"""
