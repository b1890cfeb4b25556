"""The run's key-value store in simulated runs.

* ``checker``: checks what callers of the store get.
* ``planted_store``: planted bugs of the store.
* ``work``: the calls to the store that a process makes beside its joint calls.
"""
