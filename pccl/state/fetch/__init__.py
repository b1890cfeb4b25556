"""Which piece is asked of which source.

* ``slots``: which pieces are missing, free and rare: sets that are searched and joined by the
  thousand.
* ``source``: one source of pieces: what it has, what it has been asked for, how fast it is.
* ``machine``: which piece is asked of which source, by who fetches pieces from several at once.
"""
