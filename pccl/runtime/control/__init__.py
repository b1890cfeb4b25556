"""Connections that are not lanes: greetings, the master as a peer hears it, and questions to it.

* ``greeting``: handshakes on connections: what is read before a stranger has proven who he is, and
  by when.
* ``stranger_log``: what strangers do, in the log: a few lines, then one per interval that counts
  the others.
* ``stream``: control messages on one connection, after its handshake; the master's and the peers'
  side use it.
* ``keeper``: keeps a peer's connection to the master: dials when told to, hands on what arrives.
* ``probe``: a greeting that finds out whether a peer can be dialled, and nothing else.
* ``question``: asking a master one question, without taking part in its run.
* ``status_desk``: the queue of connections that ask a master a question: one is served at a time,
  then a pause.
"""
