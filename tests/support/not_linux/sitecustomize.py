"""Makes a Python look like one on macOS, as far as the library can tell, when it starts.

It hides what only Linux has: names in ``os`` and ``socket``, ``/proc`` and ``/sys``. A Python with
this folder in ``PYTHONPATH`` imports it.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import sysconfig
from typing import Any

IN_SOCKET = (
    "SO_BINDTODEVICE", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_CONGESTION",
    "TCP_INFO", "TCP_KEEPIDLE", "TCP_QUICKACK", "TCP_USER_TIMEOUT",
)  # fmt: skip
IN_OS = (
    "copy_file_range", "eventfd", "memfd_create", "pidfd_open", "posix_fadvise",
    "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare",
)  # fmt: skip


def hide(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what lies in folders that only Linux has."""
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", path)


for module, names in ((socket, IN_SOCKET), (os, IN_OS)):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sysconfig.get_config_vars()  # they ask what the platform is, and then keep what they know
platform.uname()
sys.addaudithook(hide)
sys.platform = "darwin"
