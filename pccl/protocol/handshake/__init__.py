"""The beginning of every connection, and its encryption. Pure: callers pass in the randomness.

* ``proxy_header``: what a TCP proxy sends in front of a connection, so that its source is known.
* ``keys``: the keys of processes and of connections, and what is computed with them.
* ``certificates``: how a master vouches for the key of a newcomer.
* ``opening``: the first bytes that a side sends.
* ``token``: the tokens of a run, and their texts.
* ``exchange``: the handshake: both sides identify themselves, and prove what they claim.
* ``records``: what follows the handshake of an encrypted connection.
"""
