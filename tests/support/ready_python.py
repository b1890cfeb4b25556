"""Runs a script as ``python -W error`` does, in a fork of a process that has imported torch.

``python -I -S ready_python.py SOCKET SCRIPT ARGUMENT...``: :func:`tests.support.forks.serve` forks,
and the fork runs the script with the streams, folder, environment, arguments and namespaces of this
process. This process passes signals on, and ends with the script's status; if it is killed, so is
the fork.
"""

import contextlib
import json
import os
import signal
import socket
import sys

NAMESPACES = ("net", "mnt")
"""What ``ip netns exec`` changes."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def namespaces() -> list[int]:
    """The namespaces of this process, as open files; none on a system that has none."""
    paths = [f"/proc/self/ns/{kind}" for kind in NAMESPACES]
    return [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths if os.path.exists(path)]


def main() -> int:
    address, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"-"], [0, 1, 2, *namespaces()])
        server.sendall(json.dumps([command, os.getcwd(), dict(os.environ)]).encode() + b"\n")
        answers = server.makefile("rb")
        fork = int(answers.readline())

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork, number)

        for each in PASSED_ON:
            signal.signal(each, pass_on)
        status = answers.read(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main())
