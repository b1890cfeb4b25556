"""What people and tools learn about a run. Pure: no clock, no thread, no file.

* ``events``: one dataclass for each kind of event, and their form in JSON.
* ``stream``: the bounded stream of one process, to which all consumers listen.
* ``names``: names of peers, and texts in which they stand beside the ids.
* ``pace``: the latest call and the steps of one peer.
* ``ended``: the calls of a run that ended last.
* ``words``: the line of the log for an event.
"""
