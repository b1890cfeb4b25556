"""Shows what happens in a run: logs, metrics, recordings. All of it consumes one stream of events.

* ``events``: the events, for programs and tools that consume them.
* ``logs``: the log lines of the library.
"""
