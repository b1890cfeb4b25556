"""Bounds on the data that a process accepts from other processes.

* ``bounds``: annotations of fields, which decoders enforce.
* ``contributions``: the guard of a weighted average.
* ``texts``: makes texts of other processes safe to log, and cuts them.
* ``source_shares``: shares the unproven connections of a port among their addresses.
* ``guessing``: estimates how hard a secret is to guess.
* ``log_quota``: limits the log lines about unproven connections.
* ``allowance``: limits the bytes of messages, by the trust in their sender.
* ``early_store``: stores a bounded number of frames that arrive before their operation.
"""
