"""What is the same for all property tests."""

import pytest

from pccl.runtime.collective import memory


@pytest.fixture(autouse=True)
def part_bytes_min(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings draw when several tensors are gathered; what it is for other tests comes back."""
    monkeypatch.setattr(memory, "PART_BYTES_MIN", memory.PART_BYTES_MIN)
