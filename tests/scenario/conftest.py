"""``--record``: write what comes of each step anew."""

import pytest


@pytest.fixture
def records(request: pytest.FixtureRequest) -> bool:
    """Whether outputs are written instead of compared."""
    return bool(request.config.getoption("--record"))
