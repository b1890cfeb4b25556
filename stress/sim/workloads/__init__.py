"""What the applications of simulated processes do.

* ``application``: what a simulated process runs on the library, from its start to its end.
* ``calls``: the calls of one process: interrupted by the scenario, short of time, repeated.
* ``inputs``: what simulated peers put into collectives: it depends on seed, peer, iteration and tag
  only.
* ``collectives``: what the application of a simulated peer does: the usual loop of a churn-tolerant
  user.
* ``syncs``: the shared state of a simulated application: what a seed draws, what a process holds.
* ``state``: what the application of a simulated peer does with its shared state.
* ``toy_model``: the smallest model in which every inner step can be found again.
* ``training_plan``: what processes that train do in a simulated run, all drawn from the seed.
* ``training``: what a simulated process does that trains: ``Rounds`` and ``LocalTrainer`` over the
  engine.
"""
