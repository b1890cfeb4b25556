"""What must hold, written apart from the code that it checks.

* ``outcomes``: what must hold in every run, written apart from the code that it checks.
* ``excuses``: what was done to whom: which causes of a removal the faults of a run can have brought
  about.
* ``links``: any two living members of a group can talk again once all faults are over.
* ``told_losses``: whether the callers of one process hear that its place in the run is lost.
* ``state``: what must hold of shared state in every run, written apart from the code that it
  checks.
* ``training``: what must hold when processes train, written apart from the code that it checks.
* ``residual``: what compression leaves out of rounds is made good once, written apart from the code
  it checks.
"""
