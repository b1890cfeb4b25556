"""The shell around the pure machines: the only room with tasks, timers and threads. It carries out.

* ``clock``: the seam through which the runtime knows and waits for time.
* ``waiting``: waiting for a future without owning it: to leave does not disturb what is waited for.
* ``tasks``: background work of one engine or master: none outlives it, and no failure goes unseen.
* ``requests``: what the API hands to the engine, and what it gets back.
* ``calls``: the calls of one peer: who waits for what, with what memory, and until when.
* ``engine``: a ``PeerMachine`` with its control connection, links and data plane.
* ``control``: connections that are not lanes: greetings, the master as a peer hears it, and
  questions to it.
* ``links``: links to other peers: dialled, kept, measured, and given their lanes.
* ``collective``: one running collective: whose memory, which bytes to whom, and what comes of them.
* ``state``: shared state: served, compared and fetched.
* ``hashing``: work that takes a processor for long, off the event loop: hashing pieces, copying
  memory.
* ``master_server``: a ``MasterMachine`` on a transport. It moves messages and decides nothing.
* ``master_store``: what a master keeps between its incarnations: its run, last term, own id, and
  the members.
* ``io_thread``: the one thread per process that runs the loop, and the bridge that other threads
  use.
* ``lookups``: threads that look up names, and that nobody has to wait for.

All of it but ``io_thread`` and ``lookups`` runs unchanged in the simulator, so it uses only
``call_soon``, timers of the clock, futures and ``create_task``.
"""
