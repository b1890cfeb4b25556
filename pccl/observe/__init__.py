"""Shows what happens in a run: logs, metrics, recordings. All of it consumes one stream of events.

* ``blame``: which peer or link holds up a run, and why.
* ``events``: the events, for programs and tools that consume them.
* ``handoff``: a thread that takes items, so that callers that put them never wait.
* ``listeners``: calls several consumers, drops one that fails, and ends them with the peer.
* ``summary``: what people want to know of a status.
* ``plan``: the plan of a group, and predicted beside measured times.
* ``page``: a page that shows a run in a browser.
* ``process``: what the operating system knows of a process that does not answer.
* ``stacks``: where the threads of this process are.
* ``logs``: the log lines of the library.
* ``metrics``: the metrics of peers and masters, for Prometheus: names, labels and meanings.
* ``peer_metrics``: the values of one peer's metrics.
* ``master_metrics``: the values of a master's metrics.
* ``metrics_server``: serves them over HTTP.
* ``records``: records of peers as files, and the trace that is made of them.
"""
