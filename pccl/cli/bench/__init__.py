"""``pccl bench``: how fast the library is on this machine, and beside what.

* ``command``: ``pccl bench`` as click knows it: reads the command line, says what was found.
* ``arguments``: arguments of ``pccl bench``: sizes, lists, and whether it all fits into memory.
* ``options``: options of ``pccl bench allreduce`` that belong together: ways to reduce, and other
  hosts.
* ``variants``: ways to reduce the same bytes, which a benchmark compares round by round in turn.
* ``plan``: what is to be measured, and whether that can be.
* ``crew``: the processes of one benchmark, by name: Python programs that write lines.
* ``run``: from a plan to figures: a master, relays if links are emulated, peers, and what they
  report.
* ``signals``: signals that end a benchmark.
* ``hosts``: ``pccl bench --master``: this process is one peer of a benchmark across hosts.
* ``statistics``: from what the peers report to the figures of a case. Pure.
* ``floor``: what a reduce cannot go below on this machine, and what its promises cost on top. Pure.
* ``view``: what ``pccl bench`` shows: a table that grows on a terminal, lines when piped, or JSON
  objects.
* ``plot``: the picture of a benchmark: bandwidth over size, ours and theirs.
* ``conditions``: under which conditions a benchmark ran: machine, versions, and how it was
  measured.
* ``peers``: what runs in the processes that are measured.
* ``state``: ``pccl bench state``: fetching, hashing and joining.
"""
