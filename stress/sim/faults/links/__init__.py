"""What happens to connections.

* ``cut``: one lane of a link is reset; the others live on.
* ``reset``: a connection is reset at both ends.
* ``half_open``: a connection that one end still believes in: nothing arrives any more, and nobody
  is told.
* ``stall``: one connection stands still in one direction for a while; others of the same pair do
  not.
* ``delay``: a link takes much longer for a while.
* ``bandwidth``: a link carries little for a while.
* ``between``: what befalls all connections that there are between a process and another one, or all
  others.
* ``partition``: nothing moves between processes for a while, in both directions or in one.
* ``divide``: the first master lives and is cut off from some members, in a phase of what they do
  together.
* ``corrupt``: bits flip on the way: in one portion of what arrives, or in many for a while.
* ``undialable``: processes behind a firewall or NAT: they dial others, and nobody can dial them.
"""
