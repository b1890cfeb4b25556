"""The command line: what ``pccl`` does when typed into a shell.

* ``main``: ``pccl``: the group of commands. Each is imported only when it is used.
* ``command_line``: options and arguments of commands that end in another command.
* ``sizes``: arguments of commands that measure: sizes in bytes, and lists.
* ``streams``: standard streams that are not as one would wish: closed, or full.
* ``logs``: logging for the commands. The library itself adds no handlers; a program does, and we
  are one.
* ``master``: ``pccl master``: one master in the foreground.
* ``processes``: ``pccl launch`` and ``pccl join``: they start programs, and leave none behind.
* ``status``: ``pccl status``: how a run stands, as its master sees it.
* ``status_view``: what ``pccl status`` shows: tables on a terminal, one line for each thing when
  piped.
* ``checkpoint``: ``pccl checkpoint``: whether a checkpoint is whole, and what is in it.
* ``demo``: ``pccl demo``: a small network is trained by processes of which one is killed half-way.
* ``bench``: ``pccl bench``: how fast the library is on this machine, and beside what.
* ``stress``: ``pccl stress``: real processes under faults. The work is done by ``python -m
  pccl.stress``.

The commands are users of the library like any other: they import the public API and nothing below
it. Everybody else's rule to stay silent ends here: this is where logging gets its handlers and
where things are printed. Rich on a terminal, plain lines when piped, one JSON object for programs.
A mistake in the arguments is one line and exit status 2. Every option can be set as
``PCCL_<COMMAND>_<OPTION>`` too: flag, then environment, then default.
"""
