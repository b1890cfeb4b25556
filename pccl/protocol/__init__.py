"""The protocol as pure machines: events (with ``now_ns``) go in, effects come out.

This room decides everything that matters about a run and touches nothing: no sockets, no clock,
no threads, no randomness of its own.

* ``types``: the vocabulary (ids, views, operations, rosters, enums).
* ``errors``: the tree of errors a caller may see.
* ``limits``: every deadline and every bound, each with its reason.
* ``handshake``: how every connection begins, and the proof of the run's token.
* ``source_shares``, ``log_quota``: what strangers get of a port, and of the log.
* ``frame``: the fixed binary header of the data plane.
* ``messages``, ``codec``: control messages and their strict MessagePack encoding.
* ``credible``, ``footprint``: whether a peer may say so, and how much memory it takes.
* ``recovery``, ``restart``, ``standby``: how a master takes up a run, and which one.
* ``majority``, ``proposals``: what of several masters' words counts, and when it is told.
* ``operation``: the life cycle of one collective.
* ``master``: ``MasterMachine``, which admits, decides and removes.
* ``peer``: ``PeerMachine``, which turns calls into requests and decisions into results.
* ``peer_contact``, ``peer_membership``, ``peer_rounds``, ``peer_operations``, ``peer_left_sync``:
  what it remembers.
* ``early_store``: bounded memory for frames that arrive before their operation.
* ``history``: the bounded story that every machine keeps and prints when it fails.
"""
