"""What is fetched of a shared state, and from which source: pure.

* ``slots``: which pieces are missing, free and rare: sets that are searched and joined by the
  thousand.
* ``source``: one source of pieces: what it has, what it has been asked for, how fast it is.
* ``pieces``: which piece is asked of which source, by who fetches pieces from several at once.
* ``maps``: maps of other members' shared states, as far as they have come.
* ``target``: what a download is to bring: what was elected, or what the members show.
* ``download``: fetches a shared state from those that have it; for a sync and for a prefetch.
"""
