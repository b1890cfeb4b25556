"""The applications that simulated processes run.

* ``application``: the base class of applications, from their start to their end.
* ``calls``: makes the calls of one process: with interruptions, time limits and repeats.
* ``inputs``: draws inputs of collectives from seed, peer, iteration and tag only.
* ``collectives``: the application of a simulated peer: the loop of a program that expects churn.
* ``exchanges``: how a process makes and checks exchanges and reductions of parts.
* ``syncs``: the shared state of an application: what a seed draws, what a process holds.
* ``state``: how an application synchronizes and changes its shared state.
* ``toy_model``: a minimal model whose parameters show every inner step.
* ``training_plan``: how processes train in a simulated run, all drawn from the seed.
* ``pauses``: how long a process that trains waits for others, and what interrupts its work.
* ``joint_task``: makes the joint calls of a process, while another task trains.
* ``training_reduces``: the reduces of a process that trains, with checks of their results.
* ``training_samples``: the samples of a process that trains, if the run counts samples.
* ``training_life``: the application of a process that trains, in one or several lives.
"""
