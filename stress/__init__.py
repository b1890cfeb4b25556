"""Proof that it holds: simulated and real trouble, and the checks that judge the outcome.

Everything here may use every other room, and none of them uses this one.

* ``sim``: the production code on an in-memory network in virtual time, one seed per run.
"""
