"""``pccl bench``: how fast the library is on this machine, and beside what.

One concept each:

- :mod:`pccl.cli.bench.command` reads the command line and says what was found;
- :mod:`pccl.cli.bench.plan`, :mod:`pccl.cli.bench.variants`, :mod:`pccl.cli.bench.arguments` and
  :mod:`pccl.cli.bench.options`: what is to be measured;
- :mod:`pccl.cli.bench.run` starts the processes by :mod:`pccl.cli.bench.crew` and hears, in
  :mod:`pccl.cli.bench.words`, what they measure;
- :mod:`pccl.cli.bench.peer` is one of them: it plays :mod:`pccl.cli.bench.rounds` of
  :mod:`pccl.cli.bench.ours` with :mod:`pccl.cli.bench.values` or, if they are quantized,
  :mod:`pccl.cli.bench.samples` (whose errors :mod:`pccl.cli.bench.bounds` limits), watches
  :mod:`pccl.cli.bench.memory`, and compares with :mod:`pccl.cli.bench.gloo`;
- :mod:`pccl.cli.bench.hosts` is such a peer of a run across hosts; by
  :mod:`pccl.cli.bench.agreement` they tell each other what they measured;
- :mod:`pccl.cli.bench.statistics` makes figures of it, :mod:`pccl.cli.bench.floor` sets them beside
  what the machine permits (:mod:`pccl.cli.bench.bandwidth`);
- :mod:`pccl.cli.bench.view`, :mod:`pccl.cli.bench.plot` and :mod:`pccl.cli.bench.conditions` show
  all that;
- :mod:`pccl.cli.bench.state_command` is ``pccl bench state``: what is to be measured is in
  :mod:`pccl.cli.bench.state_plan`, :mod:`pccl.cli.bench.state_run` starts the processes
  (:mod:`pccl.cli.bench.state_peer`, :mod:`pccl.cli.bench.state_join`) that speak
  :mod:`pccl.cli.bench.state_words`, and :mod:`pccl.cli.bench.state_figures` makes figures of it.
"""
