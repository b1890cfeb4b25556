"""The simulation: the production runtime in one thread, in virtual time, from one seed.

The same seed gives the same trace, byte for byte, across hash seeds and Python versions. The
network with its faults is :mod:`pccl.transports.sim`; here is what drives it.

* ``loop``: the event loop whose clock jumps to the next timer instead of waiting for it.
"""
