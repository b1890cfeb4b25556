"""The command line: the ``pccl`` program and its commands.

* ``main``: the ``pccl`` program: a group of commands, each imported on first use.
* ``command_line``: options of commands, and a base class of commands that run another command.
* ``sizes``: arguments of commands that measure: sizes in bytes, and lists.
* ``streams``: handles standard streams that are closed, broken or full.
* ``logs``: configures logging for the commands.
* ``master``: ``pccl master`` runs one master in the foreground.
* ``processes``: ``pccl launch`` and ``pccl join``, and the child processes of
  all commands.
* ``why``: ``pccl why`` says which peer or link holds up a run, and why.
* ``runs``: which run a command is about: files that name runs, and the choice of a master.
* ``tokens``: ``pccl token`` and ``pccl expel``: who may join a run.
* ``status``: ``pccl status`` shows a run as its master sees it.
* ``status_view``: the output of ``pccl status``: tables on a terminal, one line per row when piped.
* ``record``: ``pccl record`` and ``pccl trace`` ask peers what they did last.
* ``top``: ``pccl top`` shows a run live in a terminal.
* ``page``: the option ``--http``, and the page that it serves.
* ``doctor``: ``pccl doctor`` checks this machine and its path to a run.
* ``checkpoint``: ``pccl checkpoint`` verifies a checkpoint, and shows its contents.
* ``publish``: ``pccl publish`` and ``pccl subscribe`` hand checkpoints from a run to readers.
* ``demo``: ``pccl demo`` trains a small network with several processes, and kills one half-way.
* ``bench``: ``pccl bench`` measures how fast the library is.
* ``stress``: ``pccl stress`` passes its arguments to ``python -m pccl.stress``.

The commands use the library as any program does: they import the public API and nothing below it.
Only the commands configure logging and print. They print with rich on a terminal, plain lines when
piped, and JSON objects for programs. After a mistake in the arguments they print one line, and
exit with status 2. The environment can set each option as ``PCCL_<COMMAND>_<OPTION>``. A flag
overrides the environment, and the environment overrides the default.
"""
