"""The command line: what ``pccl`` does when typed into a shell.

:mod:`pccl.cli.main` is the way in; it knows the commands by name and imports one only when it is
asked for, so that ``pccl --help`` costs nothing. One command, one module:

- ``pccl master`` (:mod:`pccl.cli.master`) runs a master until it is told to stop; ``pccl_master``
  is the same, for those who know that name.
- ``pccl launch`` (:mod:`pccl.cli.launch`) runs a command as several peers of this machine, with a
  master of its own. Their output passes through :mod:`pccl.cli.peer_output`.
- ``pccl join`` (:mod:`pccl.cli.join`) waits for a master elsewhere, then becomes a command.
- ``pccl status`` (:mod:`pccl.cli.status`) asks a master how its run stands and shows it, with
  :mod:`pccl.cli.status_view`.
- ``pccl demo`` (:mod:`pccl.cli.demo`) trains a small network with several processes, kills one of
  them half-way and shows that the others carry on. What one of those processes does is in
  :mod:`pccl.cli.demo_peer` and is meant to be copied; what the processes tell the demo, and how it
  judges them, is in :mod:`pccl.cli.demo_record`; what is shown, in :mod:`pccl.cli.demo_view`.
- ``pccl bench`` (:mod:`pccl.cli.bench`) measures how fast the library is on this machine, beside
  Gloo and beside what the machine permits; its package says what it consists of.
- ``pccl stress`` (:mod:`pccl.cli.stress`) hands over to the harness, ``python -m pccl.stress``.

Processes are started, heard and ended by :mod:`pccl.cli.children`, with :mod:`pccl.cli.guard` for
the day that the command itself is killed; :mod:`pccl.cli.lines` cuts what they write into lines,
:mod:`pccl.cli.programs` finds the program that a name stands for, and :mod:`pccl.cli.command_line`
is for commands that end in another command.

The commands are users of the library like any other: they import the public API and nothing below
it. Everybody else's rule to stay silent ends here: this is where logging gets its handlers
(:mod:`pccl.cli.logs`) and where things are printed. Rich on a terminal, plain lines when piped,
one JSON object for programs. A mistake in the arguments is one line and exit status 2
(:mod:`pccl.cli.main`). Every option can be set as ``PCCL_<COMMAND>_<OPTION>`` too: flag, then
environment, then default.
"""
