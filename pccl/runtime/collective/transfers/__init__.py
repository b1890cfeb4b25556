"""Running collectives on this peer: their buffers, received segments and outlets.

* ``inlet``: the segments that one peer sends, and one that is arriving.
* ``transfer``: the part that all schedules share.
* ``chain``: each peer sends to the next one: ring and broadcast.
* ``direct``: each segment has an owner that receives contributions and sends the result: mesh and
  star.
* ``gather``: each peer adds up all contributions: sparse formats.
* ``exchange``: each peer gives blocks to others: all-gather, gather, scatter and all-to-all.
"""
