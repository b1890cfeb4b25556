"""The pure decisions about shared state: layout, digests, election and download.

* ``layout``: the layout of a shared state: its tensors in order, cut into pieces.
* ``digests``: the digests of pieces, of tensors and of the whole state.
* ``compare``: finds the first difference between two shared states, and describes it.
* ``election``: decides from all members' offers which contents count.
* ``fetch``: decides which pieces a peer fetches, and from which sources.
* ``delta``: what has changed in a piece, as the changed elements and their places.
* ``versions``: published versions: their names, their layouts, and how to get to one.
* ``attempts``: decides whether a call retries a failed attempt.
* ``checkpoint_header``: the header of a checkpoint, which is a safetensors file with revision,
  lineage and digests.
"""
