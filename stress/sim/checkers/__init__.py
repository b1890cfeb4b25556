"""Checkers of the promises, independent of the code that they check.

* ``outcomes``: checks results, outcomes, inputs, memory and membership in every run.
* ``in_run``: an operation, and the run that it belongs to.
* ``excuses``: records what faults did, and decides which removals they explain.
* ``guards``: checks which contributions to guarded averages are flagged, excluded or refused.
* ``links``: checks that living members of a group have links once all faults are over.
* ``told_losses``: checks that callers get an error when their process loses its place.
* ``told_events``: checks that the events of a peer tell the truth, and nothing twice.
* ``late_claims``: checks that a process misses no result that members committed without it.
* ``round_quorums``: checks that a round goes on only if each group has a quorum.
* ``state``: checks the synchronization of shared state.
* ``training``: checks rounds, synchronizations and the work of processes that train.
* ``samples``: checks that each sample is in the model once, and that the ledger says so.
* ``turns``: checks that a process takes part in rounds after it was late, or for one that leaves.
* ``residual``: checks that members pay back the rounding error of compressed rounds once.
"""
