"""The command line: what ``pccl`` does when typed into a shell.

:mod:`pccl.cli.main` is the way in; it knows the commands by name and imports one only when it is
asked for, so that ``pccl --help`` costs nothing. One command, one module:

- ``pccl master`` (:mod:`pccl.cli.master`) runs a master until it is told to stop.
- ``pccl demo`` (:mod:`pccl.cli.demo`) trains a small network with several processes, kills one of
  them half-way and shows that the others carry on. What one of those processes does is in
  :mod:`pccl.cli.demo_peer` and is meant to be copied; what the processes tell the demo, and how it
  judges them, is in :mod:`pccl.cli.demo_record`; what is shown, in :mod:`pccl.cli.demo_view`.

The commands are users of the library like any other: they import the public API and nothing below
it. Everybody else's rule to stay silent ends here: this is where logging gets its handlers
(:mod:`pccl.cli.logs`) and where things are printed. Rich on a terminal, plain lines when piped,
one JSON object for programs. Every option can be set as ``PCCL_<COMMAND>_<OPTION>`` too: flag, then
environment, then default.
"""
