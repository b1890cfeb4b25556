"""Shared state, pure: its layout, its digests, whose counts, and what is fetched from whom.

* ``layout``: the layout of a shared state: its tensors in order, cut into pieces.
* ``digests``: digests of shared state: of pieces, of tensors, of everything.
* ``compare``: where two shared states differ first, in words for people.
* ``election``: whose shared state counts: from what all members offer to what becomes of it.
* ``fetch``: what is fetched of a shared state, and from which source.
* ``attempts``: what follows when an attempt of a synchronization fails.
* ``checkpoint_header``: what a checkpoint says of itself, and how that is written in front of a
  safetensors file.
"""
