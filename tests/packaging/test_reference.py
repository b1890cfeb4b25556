"""The pages of docs/protocol that list messages and limits say what the code says."""

from __future__ import annotations

import pytest

from pccl.stress.studies.reference import FOLDER, pages


@pytest.mark.parametrize("name", list(pages()))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    on_disk = (FOLDER / name).read_text("utf-8")
    assert on_disk == pages()[name], "run: python -m pccl.stress reference"
