"""Every link in README, docs and the like leads somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def without_code(text: str) -> str:
    """The same, without fenced blocks: what looks like a link or a heading there is none."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    found = set[str]()
    for heading in re.findall(
        r"^#+ +(.*?) *$", without_code(page.read_text("utf-8")), re.MULTILINE
    ):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number, unique = 0, name
        while unique in found:
            number += 1
            unique = f"{name}-{number}"
        found.add(unique)
    return found


def broken_links(page: Path) -> Iterator[str]:
    """Links that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue  # the internet
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("room", ["pccl", "transports", "bindings", "stress", "examples", "tests"])
def test_pages_that_code_names_exist(room: str) -> None:
    named = {
        (path.relative_to(ROOT), page)
        for path in (ROOT / room).rglob("*.py")
        for page in re.findall(r"docs/[\w/\-]+\.md", path.read_text("utf-8"))
    }
    assert {(path, page) for path, page in named if not (ROOT / page).exists()} == set()
