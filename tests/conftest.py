"""What is the same for every test: one profile for property tests, and a Ctrl-C that arrives.

A test may be a coroutine function. Of its fixtures the one with a method ``run_test`` runs it, or
``asyncio.run`` does.
"""

import asyncio
import gc
import inspect
import logging
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal import entropy

from tests.support.patience import PATIENCE, VARIABLE

# Before torch comes. Its tensors here are small, and threads that share one out spin for longer
# than they compute; tests run side by side anyway. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "deterministic",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("deterministic")
# Before each example Hypothesis seeds the global generator of NumPy, which nothing here draws from.
entropy.NP_RANDOM = random.Random()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it runs behind
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the outputs of scenarios anew")


def pytest_report_header() -> str:
    return f"limits on real time: {PATIENCE:g} times the usual ones ({VARIABLE}=... says otherwise)"


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end; a garbage collection need not visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_earlier_modules_left_is_not_visited() -> None:
    """Imports, torch above all, and the results of tests live to the end, too."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    fixtures: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    runners = (getattr(one, "run_test", None) for one in fixtures.values())
    run = next(filter(None, runners), asyncio.run)
    run(pyfuncitem.obj(**fixtures))
    return True


@pytest.fixture(autouse=True)
def logging_stays_as_it_was() -> Iterator[None]:
    """A command that runs inside a test sets up logging for its whole process."""
    root, ours = logging.getLogger(), logging.getLogger("pccl")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
