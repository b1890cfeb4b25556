"""One running collective: its memory, and the segments that it sends and receives.

* ``memory``: separate arrays, addressed as one tensor.
* ``operand``: the caller's arrays: checked, then borrowed until the collective ends.
* ``block_operand``: the same for buffers whose lengths depend on the group.
* ``plans``: what an operation needs that depends only on its request and its ring; kept for later
  operations.
* ``buffers``: reusable memory for segments, and for inputs of collectives in place.
* ``announcer``: lets peers of this machine pull the segments of one operation.
* ``outlet``: the segments that one collective sends to one peer.
* ``weighted_ranks``: whose contributions to a weighted average are read, and must be finite.
* ``transfers``: running collectives on this peer, one module for each kind of schedule.
* ``coding``: encodes sent values and decodes received ones with ``collectives.quantization``, and
  keeps the rounding errors.
* ``data_plane``: gives every received frame its sink, and owns the running transfers.
* ``reduce_many``: many reduces as one call: some at a time, each retried after a loss.
"""
