"""Who coordinates a run: admits, decides, removes, and tells all of it in one order.

* ``events``: what goes in, and the effects that come out.
* ``machine``: ``MasterMachine``: operations.
* ``rounds``: joint decisions, admission among them.
* ``registrar``: connections, registration, links, silence and removal.
* ``credible``: whether a peer may say so.
* ``membership``: who is in the run, in which groups and views.
* ``link_states``: which links are up, as their two ends say.
* ``dial_plans``: who is asked to dial whom.
* ``ballots``: the votes over operations.
* ``lockstep``: callers that wait for each other in vain.
* ``status``: the run as it is, for people.
* ``succession``: a restarted master, standbys, and whose word counts.
"""
