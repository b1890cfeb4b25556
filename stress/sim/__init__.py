"""The deterministic simulation: it runs the production runtime in virtual time, from one seed.

* ``loop``: an asyncio event loop in virtual time: its clock jumps to the next timer instead of
  waiting.
* ``trace``: the trace of a run: a hash of all events, and the last events as text.
* ``links``: links that send some frames twice and corrupt some shared state.
* ``curves``: keys for simulated processes, in little time.
* ``process``: simulated processes: the production classes with a simulated clock and host.
* ``scenarios``: what a seed draws, and how a scenario is stored, replayed and reduced.
* ``workloads``: the applications that simulated processes run.
* ``store``: the run's key-value store in simulated runs.
* ``publication``: published versions in simulated runs, and their readers.
* ``faults``: faults of a simulated run: each is a dataclass with a script that carries it out.
* ``parts``: the objects that all parts of one simulated run share.
* ``builder``: builds the masters, the peers with their applications, and the links of a run.
* ``stage``: the stage of one run: its masters, peers and network, and what faults may do to them.
* ``fold``: expected results of a reduce, computed without the library's arithmetic.
* ``checkers``: checkers of the promises, independent of the code that they check.
* ``runner``: runs one seed: the production runtime in virtual time, with faults and checkers.
* ``planting``: how a bug is planted.
* ``planted_quorums``: planted bugs of calls with a quorum, and of samples.
* ``planted``: planted bugs, which the checkers must detect.
* ``command_line``: the simulator's command: ``python -m pccl.stress sim --seeds A:B``.
"""
