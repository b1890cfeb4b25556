"""The deterministic simulation: the production runtime in virtual time, from one seed.

* ``loop``: an asyncio event loop in virtual time: its clock jumps to the next timer instead of
  waiting.
* ``trace``: the trace of a run: a hash over everything that happened, and the last lines of the
  story.
* ``links``: links of simulated processes: they send some frames twice, and shared state that is
  wrong.
* ``process``: simulated processes: the production classes, each behind a clock and a host that can
  die.
* ``scenarios``: what a seed means, and how it is kept, replayed and reduced.
* ``workloads``: what the applications of simulated processes do.
* ``faults``: what goes wrong in a simulated run: each fault is data, and a script that strikes.
* ``parts``: what everything in one simulated run has in common.
* ``builder``: builds what takes part in a run: masters, peers with their applications, and links.
* ``stage``: the stage of one run: master, peers and network, and what faults may do to them.
* ``fold``: what a reduce must give, written from the definition and apart from the library's
  arithmetic.
* ``checkers``: what must hold, written apart from the code that it checks.
* ``runner``: runs one seed: the production runtime in virtual time, under the scenario's faults,
  checked.
* ``planted``: planted bugs: what the simulator must be able to see.
* ``command_line``: the simulator's command: ``python -m pccl.stress sim --seeds A:B``.
"""
