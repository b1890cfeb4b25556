"""The shell around the pure machines: the only room with tasks, timers and threads.

* ``clock``: the interface through which the runtime reads the time and sets timers.
* ``waiting``: waits for futures that other code owns; cancelling a wait cancels no future.
* ``tasks``: background tasks of one engine or master: they end with it, and failures are reported.
* ``requests``: requests from the API to the engine, and the results that the engine returns.
* ``calls``: the calls of one peer: their futures, borrowed memory and deadlines.
* ``engine``: a ``PeerMachine`` with its control connection, links and data plane.
* ``control``: connections that are not lanes: handshakes, a peer's connection to the master, and
  questions to a master.
* ``links``: dials, keeps and measures the links to other peers, and routes their frames.
* ``collective``: one running collective: its memory, and the segments that it sends and receives.
* ``state``: serves, compares and fetches shared state.
* ``publishing``: publishes versions of shared state, and reads them from outside the run.
* ``hashing``: runs long CPU work off the event loop: hashing pieces, copying memory.
* ``master_server``: a ``MasterMachine`` on a transport. It moves messages and decides nothing.
* ``master_store``: state that a master stores across restarts: its run, last term, own id, and the
  members.
* ``keys_file``: the file with the key and the tokens of a run, which commands change.
* ``run_tokens``: makes and revokes tokens in that file.
* ``io_thread``: the one thread per process that runs the loop, and how other threads submit work.
* ``evidence``: gathers evidence for people: whatever happens, there is an answer.
* ``lookups``: threads that look up host names, and that do not delay the end of the process.

All modules but ``io_thread`` and ``lookups`` run unchanged in the simulator, so they use only
``call_soon``, timers of the clock, futures and ``create_task``.
"""
