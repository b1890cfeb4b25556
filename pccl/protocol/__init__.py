"""The pure vocabulary of the protocol, and its encoding in bytes.

* ``types``: ids, views, operations, rosters, enums.
* ``vocabulary``: values that ``types`` builds on.
* ``data_type``: the element types of tensors.
* ``errors``: the tree of errors that a caller may see.
* ``limits``: every deadline and every bound, each with its reason.
* ``operation``: the life cycle of one collective.
* ``shared_state``: offers, elections and differences of shared states.
* ``checksum``: checksums that find damaged bytes.
* ``handshake``: the beginning of every connection, with the proofs of keys and token.
* ``frame``: the fixed binary header of the data plane.
* ``messages``: control messages between a peer and its master.
* ``link_messages``: control messages about links.
* ``run_messages``: control messages between masters.
* ``publication``: published versions of shared state, and the messages about them.
* ``status_report``: the answer of a master to ``pccl status``.
* ``port_mapping``: how a process asks its router to forward a port.
* ``codec``: the strict MessagePack encoding of control messages.
* ``guards``: bounds on the data that a process accepts from other processes.
"""
