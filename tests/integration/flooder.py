"""Dials a port as often as it is told to, from as many addresses, and keeps what it has open.

Arguments: host, port, dials a second, seconds, number of addresses, bytes to say (hexadecimal). It
goes on until its standard input ends, or for so many seconds; then it says how often it dialled.
"""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

_SPARE = 50


def print_line(text: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Dial."""
    host, port, rate, limit_s, addresses, says = sys.argv[1:]
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < min(hard, 8192):
        soft = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    held: deque[socket.socket] = deque()
    waiting: deque[socket.socket] = deque()
    words = bytes.fromhex(says)
    made, began_s = 0, time.monotonic()
    print_line("dials")
    while (passed_s := time.monotonic() - began_s) < float(limit_s) and not ended.is_set():
        while made < passed_s * float(rate):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((f"127.0.0.{2 + made % int(addresses)}", 0))
            sock.connect_ex((host, int(port)))
            held.append(sock)
            waiting.append(sock)
            made += 1
            if len(held) > soft - _SPARE:
                held.popleft().close()
        time.sleep(0.002)
        while words and waiting:
            with suppress(OSError):
                waiting.popleft().send(words)
    print_line(str(made))


if __name__ == "__main__":
    main()
