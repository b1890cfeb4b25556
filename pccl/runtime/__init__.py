"""The shell around the pure machines: the only room with tasks, timers and threads.

* ``clock``: the seam through which everything here knows and waits for time.
* ``greeting``: the handshake that opens every connection, and where strangers wait.
* ``stranger_log``: the lines that they cause.
* ``control``: control messages on one connection, for both sides.
* ``master_server``: ``MasterMachine`` on a transport.
* ``link_keeper``: keeps the links to other peers, dials and redials.
* ``operand``: the caller's arrays, checked and borrowed.
* ``transfer``: one running collective: schedule, buffers, received set.
* ``data_plane``: gives every frame its memory and its meaning.
* ``engine``: ``PeerMachine`` with its control connection, links and data plane.
* ``io_thread``: the one thread per process that runs the loop.

All of it but ``io_thread`` runs unchanged in the simulator, so it uses only ``call_soon``,
timers of the clock, futures and ``create_task``.
"""
