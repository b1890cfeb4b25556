"""``pccl demo``: a small network is trained by processes of which one is killed half-way.

* ``command``: ``pccl demo``: several processes train one network; one is killed, another one joins
  half-way.
* ``peer``: one process of the demo: a network that learns digits, its gradients averaged with the
  others'.
* ``record``: what the demo's processes report, what becomes of it, and the judgement at the end.
* ``view``: what the demo shows: a live table on a terminal, lines when piped, one object for
  programs.
"""
