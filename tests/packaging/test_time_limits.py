"""Limits on real time come from tests/support/patience.py; a number in a test fits one machine."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PLACE = TESTS / "support" / "patience.py"

WAITS = {"join", "settimeout", "result", "exception", "timeout", "wait_for", "wait"}
"""Calls whose number is a limit. Unit tests ``wait(5)`` in virtual time."""

CLOCKS = {"monotonic", "perf_counter", "time"}


def is_number(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return False
    return isinstance(node.value, int | float) and node.value >= 1


def reads_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Attribute)
        and one.attr in CLOCKS
        and isinstance(one.value, ast.Name)
        and one.value.id == "time"
        for one in ast.walk(node)
    )


def limits_in(source: str, *, machines: bool) -> Iterator[tuple[int, str]]:
    """Line and text of every limit on real time that is a plain number."""
    waits = WAITS - {"wait", "timeout"} if machines else WAITS
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            named = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            count = 2 if attribute == "wait_for" else 1
            waits_so_long = attribute in waits and len(node.args) == count
            found = any(map(is_number, named)) or (waits_so_long and is_number(node.args[-1]))
        elif isinstance(node, ast.Compare):
            found = reads_a_clock(node.left) and any(map(is_number, node.comparators))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            found = reads_a_clock(node.left) and is_number(node.right)
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found = any(name.endswith("LIMIT_S") for name in names) and is_number(node.value)
        else:
            found = False
        if found:
            yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def test_no_limit_on_real_time_is_a_plain_number() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != PLACE
        for line, text in limits_in(
            path.read_text(encoding="utf-8"),
            machines=path.relative_to(TESTS).parts[0] in ("unit", "property", "simulation"),
        )
    ]
    assert found == [], "take LIMIT_S, LONG_LIMIT_S or patient() from tests.support.patience"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("subprocess.run(command, timeout=60)", 1),
        ("future.result(30.0)", 1),
        ("assert time.monotonic() - began_s < 3.0", 1),
        ("give_up_s = time.monotonic() + 20", 1),
        ("LIMIT_S = 60.0", 1),
        ("future.result(LIMIT_S)", 0),
        ("assert time.monotonic() - began_s < patient(3.0)", 0),
        ("sock.settimeout(0.02)", 0),  # short on purpose: nothing is to come
        ("', '.join(names)", 0),
    ],
)
def test_what_counts_as_a_plain_number(source: str, count: int) -> None:
    assert len(list(limits_in(source, machines=False))) == count


def limit(patience: str | None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment.pop("PCCL_TEST_PATIENCE", None)
    if patience is not None:
        environment["PCCL_TEST_PATIENCE"] = patience
    script = "from tests.support.patience import LIMIT_S, patient; print(LIMIT_S, patient(3))"
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_factor_can_be_said() -> None:
    assert limit("2.5").stdout == "300.0 7.5\n"
    for wrong in ("0", "-1", "inf", "nan", "many"):
        refused = limit(wrong)
        assert refused.returncode != 0
        assert f"must be a number above 0, and it is '{wrong}'" in refused.stderr


def test_without_it_the_machine_is_measured() -> None:
    limit_s, promise_s = map(float, limit(None).stdout.split())
    assert 120.0 <= limit_s <= 400.0
    assert limit_s == pytest.approx(min(40 * promise_s, 400.0))
