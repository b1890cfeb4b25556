"""Compares plans of all-reduces over an emulated wide-area network, with real peers at its sites.

* ``bounds``: the shortest times that a matrix allows, from first principles. Pure.
* ``peer``: one peer: enters its site, joins the run, and plays the rounds.
* ``measures``: compares the links that the master knows with the matrix. Pure.
* ``run``: runs the network, the master and the peers, and gathers their reports.
* ``command``: the command ``wan``.
"""
