"""Published versions in simulated runs, and their readers.

* ``checker``: what readers may show, and when all of them must have the last version.
* ``work``: the versions that a process publishes beside its joint calls.
* ``readers``: the processes of readers, with what happens to them.
* ``planted_publication``: planted bugs of publishing.
"""
