"""The links between the peers of a run, as their master knows them.

* ``link_states``: which links are up, as both ends report.
* ``dial_plans``: which peer dials which.
* ``peer_links``: brings up links, and finds out which peers can be dialled.
"""
