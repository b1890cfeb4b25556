"""How a process asks its router to forward a TCP port. Pure: bytes in, bytes out.

* ``answers``: what a router may answer, in whichever protocol.
* ``pcp``: the Port Control Protocol (RFC 6887).
* ``nat_pmp``: NAT-PMP (RFC 6886), which came before it.
"""
