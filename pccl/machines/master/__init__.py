"""The master admits and evicts peers, decides operations, and sends all decisions in one order.

* ``machine``: ``MasterMachine``, which owns all parts and gives each event to one of them.
* ``events``: the events that the machine handles, and the effects that it returns.
* ``connections``: the effects of one event, and the peer behind each connection.
* ``credible``: checks of what returning peers report.
* ``membership``: the peers, groups, views and rosters of the run.
* ``registration``: how peers register, resume and return.
* ``tokens``: the tokens with which processes may register, and the keys that may not.
* ``admission``: who may connect to a master, and register with it.
* ``removal``: how peers are removed, and the causes.
* ``links``: which links are up, which peer dials which, and which can be dialled.
* ``ballots``: the votes over operations: commit or abort, also after a member is lost.
* ``rounds``: joint decisions, admission among them.
* ``waits``: which member waits for which, and reports of long waits.
* ``lockstep``: finds callers that wait for each other in vain.
* ``status``: reports the state of the run to people.
* ``inquiries``: passes questions of people on to peers, and the answers back.
* ``succession``: restart, standbys, and which master coordinates the run.
"""
