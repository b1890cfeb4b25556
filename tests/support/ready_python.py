"""Runs a script as ``python -W error`` does, in a fork of a process that has imported torch.

``python -I -S ready_python.py SOCKET SCRIPT ARGUMENT...``: :func:`tests.support.forks.serve` forks,
and the fork runs the script with the streams, folder, environment and arguments of this process.
This process ends with the script's status; if it is killed, so is the fork.
"""

import json
import os
import socket
import sys


def main() -> int:
    address, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"-"], [0, 1, 2])
        server.sendall(json.dumps([command, os.getcwd(), dict(os.environ)]).encode() + b"\n")
        status = server.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main())
