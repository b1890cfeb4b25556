"""The vocabulary and the wire, pure: what the machines speak of, and how it looks in bytes.

* ``types``: ids, views, operations, rosters, enums.
* ``data_type``: what tensors are made of.
* ``errors``: the tree of errors a caller may see.
* ``limits``: every deadline and every bound, each with its reason.
* ``operation``: the life of one collective.
* ``shared_state``: states, who has which, and how they differ.
* ``checksum``: how damage is found.
* ``handshake``: how every connection begins, and the proof of the run's token.
* ``frame``: the fixed binary header of the data plane.
* ``messages``: control messages.
* ``link_messages``: those about links.
* ``run_messages``: those between masters.
* ``status_report``: what a master answers to whoever asks.
* ``codec``: their strict MessagePack encoding.
* ``guards``: what bounds that which comes from outside.
"""
