"""The master admits, decides and evicts, and announces all of it in one order.

* ``machine``: ``MasterMachine``: all parts, and which of them an event is for.
* ``events``: what goes in, and the effects that come out.
* ``connections``: the effects of one event; who is behind each connection.
* ``credible``: checks of what returning peers report.
* ``membership``: who is in the run, in which groups and views.
* ``registration``: peers that come, and that come back.
* ``removal``: peers that go, and why.
* ``link_states``: which links are up, as their two ends say.
* ``dial_plans``: who is asked to dial whom.
* ``peer_links``: how links are brought about, and who can be dialled.
* ``ballots``: the votes over operations, and what came of them.
* ``rounds``: joint decisions, admission among them.
* ``waits``: which member waits for which, and the reports about it.
* ``lockstep``: callers that wait for each other in vain.
* ``status``: the run as it is, for people.
* ``succession``: restart, standbys, and which master is in charge.
"""
