"""What happens to processes, and what strangers do.

* ``kill``: a process is killed, as by SIGKILL, in a phase of its life; perhaps another takes its
  place.
* ``freeze``: a process is stopped for a while, as by SIGSTOP; its kernel goes on.
* ``slow``: a process gets little CPU: whatever comes is handled late.
* ``clock_pause``: a whole machine sleeps for a while: its process, its kernel and, perhaps, its
  clock.
* ``load``: a process is busy with what others send it, and a member that the rest waits for is
  stopped.
* ``interrupt``: the calls that a process is in are cancelled, as by Ctrl-C, and repeated.
* ``leave``: a process closes its communicator while calls are open.
* ``joiners``: many newcomers at once.
* ``master``: the master dies; another incarnation, or a standby, takes up the run, or nobody does.
* ``state``: what goes wrong with shared state: liars, and what strikes while it is being fetched.
* ``garbage``: a hostile connection: somebody who does not belong to the run sends bytes to one of
  its ports.
"""
