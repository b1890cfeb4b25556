"""Secrets in files, as the library wants them kept."""

from __future__ import annotations

from pathlib import Path


def keep(path: Path, secret: str | bytes) -> Path:
    """Write a secret to a file that nobody else may read; returns the file."""
    path.touch(mode=0o600)
    path.write_bytes(secret.encode() if isinstance(secret, str) else secret)
    return path
