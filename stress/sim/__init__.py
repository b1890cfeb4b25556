"""The deterministic simulation: the production runtime in virtual time, from one seed.

* ``loop``: an asyncio loop whose clock jumps; ``trace``: what happened, as a hash and a story.
* ``scenario``: what a seed means; ``faults``: carries out its kills, resets and stalls.
* ``process``: the production classes, each behind a clock and a host that can die.
* ``workload``: what the application of a peer does.
* ``checkers``: what must hold, written apart from the code that it checks.
* ``runner``: one seed, from its draw to its verdict.
* ``planted``: known bugs, to prove that all this can see.
"""
