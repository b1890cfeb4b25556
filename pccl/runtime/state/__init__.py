"""Shared state in the runtime: upload, comparison and download.

* ``memory``: the tensors of a shared state in host memory, and the pieces fetched for it.
* ``frames``: sends frames of shared state, and checks their lengths.
* ``upload``: sends pieces, maps and layouts of one shared state to peers that ask.
* ``receiver``: carries out the decisions of a download, and passes received frames to it.
* ``comparison``: finds where this peer's state differs from that of another member.
* ``session``: uploads, compares and downloads one shared state in one operation.
* ``sync``: one call that synchronizes or compares shared state, with all its attempts.
* ``service``: runs the calls about shared state for a peer's engine.
* ``exchange``: owns all uploads and downloads of this peer, and routes frames to them.
* ``snapshot``: a synchronized state that newcomers may fetch while the members keep working.
* ``prefetch``: a newcomer's download of its group's state before the admission.
* ``running_prefetch``: a newcomer's prefetch and replay, from registration to admission.
* ``results``: results of reductions, which a member offers to newcomers for their replay.
* ``replay``: applies the members' reductions to the state of a newcomer.
* ``progress``: reports the progress of a download to the program.
"""
