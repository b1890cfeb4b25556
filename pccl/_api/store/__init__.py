"""The run's key-value store, as programs see it.

* ``questions``: checks the arguments of a call, and makes a question from them.
* ``faces``: the calls, for asyncio and blocking.
"""
