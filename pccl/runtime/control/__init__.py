"""Connections that are not lanes: handshakes, a peer's connection to the master, questions to it.

* ``greeting``: handshakes on connections, bounded in number, bytes and time.
* ``stranger_log``: limits the log lines that unproven connections can cause: a few lines, then one
  per interval with the number of omitted lines.
* ``stream``: control messages on one connection, after its handshake; the master and the peers use
  this class.
* ``keeper``: keeps a peer's connection to the master: dials when the machine asks, and passes on
  received messages.
* ``probe``: a test of whether a peer can be dialled: only a handshake.
* ``question``: asks a master one question, without joining its run.
* ``status_desk``: the queue of connections that ask a master a question. It serves one at a time,
  then pauses.
"""
