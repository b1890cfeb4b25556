"""What people and tools learn about a run. Pure: no clock, no thread, no file.

* ``events``: one dataclass for each kind of event, and their form in JSON.
* ``stream``: the bounded stream of one process, to which all consumers listen.
* ``names``: names of peers, and texts in which they stand beside the ids.
* ``pace``: the latest call and the steps of one peer.
* ``ended``: the calls of a run that ended last.
* ``link_paths``: how two peers are connected, and why that is not better.
* ``blame``: which peer or link holds up a run, and why.
* ``clocks``: the clock of the master, as a peer knows it.
* ``evidence``: the form of a peer's answers to people.
* ``words``: the line of the log for an event.
* ``recorder``: what one peer did last, and its form in JSON, the record.
* ``records``: records of other processes, checked.
* ``trace``: one trace of all peers, made from their records.
"""
