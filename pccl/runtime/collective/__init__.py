"""One running collective: its memory, and the segments that it sends and receives.

* ``memory``: separate arrays, addressed as one tensor.
* ``operand``: the caller's arrays: checked, then borrowed until the collective ends.
* ``plans``: what an operation needs that depends only on its request and its ring; kept for later
  operations.
* ``buffers``: reusable memory for segments, and for inputs of collectives in place.
* ``announcer``: lets peers of this machine pull the segments of one operation.
* ``outlet``: the segments that one collective sends to one peer.
* ``weighted_ranks``: whose contributions to a weighted average are read, and must be finite.
* ``transfer``: one running collective on this peer: its buffers, received segments and outlets.
* ``chain_transfer``: a collective in which each peer sends to the next one: ring and broadcast.
* ``direct_transfer``: a collective in which each segment has an owner that receives contributions
  and sends the result: mesh and star.
* ``gather_transfer``: a collective in which each peer adds up all contributions: sparse formats.
* ``coding``: encodes sent values and decodes received ones with ``collectives.quantization``, and
  keeps the rounding errors.
* ``data_plane``: gives every received frame its sink, and owns the running transfers.
* ``reduce_many``: many reduces as one call: some at a time, each retried after a loss.
"""
