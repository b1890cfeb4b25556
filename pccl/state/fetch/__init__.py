"""The pure decisions of a download: which pieces a peer fetches, and from which sources.

* ``slots``: the sets of missing, free and rare pieces, which are fast to search and to combine.
* ``source``: one source of pieces: what it has, its outstanding pieces, and its rate.
* ``pieces``: chooses which source is asked for which missing piece.
* ``maps``: the maps that a peer has requested, until they are complete.
* ``target``: what a download fetches: the elected contents, or the members' snapshot.
* ``published``: what a reader fetches: a state whose digest it has from the master.
* ``download``: fetches a shared state from several sources, for a synchronization or a prefetch.
"""
