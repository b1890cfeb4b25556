"""One running collective: whose memory, which bytes to whom, and what comes of them.

* ``memory``: arrays that lie anywhere, as if they were one.
* ``operand``: the caller's arrays: checked at the edge, then borrowed until the call returns.
* ``buffers``: memory for segments that cannot be read straight into their place; used again and
  again.
* ``outlet``: what one running collective sends to one peer.
* ``transfer``: one running collective on this peer: buffers, received sets, outlets.
* ``chain_transfer``: a collective in which each peer sends to the next one: ring and broadcast.
* ``direct_transfer``: contributions go to the owner of each segment, results come from it.
* ``coding``: encodes what one running collective sends, decodes what it receives, and keeps what
  that costs in accuracy.
* ``data_plane``: gives every frame its sink: the frames of all links meet the transfers here.
* ``reduce_many``: many reduces as one call: each is tried again until it succeeds, some at a time.
"""
