"""Connections that are not lanes: handshakes, a peer's connection to the master, and questions.

* ``greeting``: handshakes on connections, bounded in number, bytes and time.
* ``proxy_header``: receives the header that a named proxy sends in front of a connection.
* ``stranger_log``: limits the log lines that other processes can cause: a few lines, then one count
  per interval.
* ``stream``: control messages on one connection, after its handshake; the master and the peers use
  this class.
* ``keeper``: keeps a peer's connection to the master: dials when the machine asks, and passes on
  received messages.
* ``probe``: tests whether a peer can be dialled: connects, does the handshake, and disconnects.
* ``master_keys``: the key and the tokens of a master, as its file has them.
* ``question``: asks a master one question, without joining its run.
* ``examination``: examines the path to a run, for a process that does not join it.
* ``status_desk``: the queue of connections that ask a master a question: one is served at a
  time, with pauses.
"""
