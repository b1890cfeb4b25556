"""A headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.patience import LIMIT_S

_EXEC = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100) for fd in sys.argv[1:3]]
for place, fd in zip((3, 4), ours):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3, and writes answers to 4."""


class Browser:
    """One window of a browser.

    Attributes:
        complaints: errors of the pages' scripts, and what the browser has refused to load.
    """

    def __init__(self, path: str, profile: Path, width: int = 1100, height: int = 900) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        options = (
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
        )  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(commands), str(answers), path, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.complaints: list[str] = []
        self._last = 0
        self._buffer = b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def until(self, text: str) -> str:
        """Wait until the document has ``text``, and return it."""
        deadline_s = time.monotonic() + LIMIT_S
        while text not in (shown := str(self.evaluate("document.documentElement?.outerHTML"))):
            assert time.monotonic() < deadline_s, shown
            time.sleep(0.05)
        return shown

    def picture(self) -> bytes:
        """Return what the window shows, as a PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        asked = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._commands, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._last:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            if told["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(told["params"]))

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], deadline_s - time.monotonic())
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 1 << 20)
            assert data, f"the browser has ended with {self._process.wait()}"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
