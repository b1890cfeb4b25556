"""The links between the peers of a run, as their master knows them.

* ``link_states``: which links are up, as both ends report.
* ``dial_plans``: which peer dials which.
* ``meetings``: which peers meet at which relay.
* ``plan_renewal``: when the plan of a group is compared with new measures.
* ``peer_links``: brings up links, and finds out which peers can be dialled.
"""
