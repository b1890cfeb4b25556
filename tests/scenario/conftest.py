"""``--record``: write what comes of each step anew."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the outputs of scenarios anew")


@pytest.fixture
def records(request: pytest.FixtureRequest) -> bool:
    """Whether outputs are written instead of compared."""
    return bool(request.config.getoption("--record"))
