"""Published versions of shared state, and the messages about them.

* ``versions``: what a version is, and how readers and members speak with the master about it.
"""
