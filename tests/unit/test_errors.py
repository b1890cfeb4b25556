from __future__ import annotations

import types

import pytest

from pccl.errors import warn_deprecated

INSIDE = """
def called():
    deeper()

def deeper():
    warn_deprecated("Old.name", "New.name", "1.4")
"""


def test_the_line_of_the_program_is_named() -> None:
    library = types.ModuleType("pccl.anything")
    vars(library)["warn_deprecated"] = warn_deprecated
    exec(INSIDE, vars(library))
    with pytest.warns(DeprecationWarning, match="use New.name") as told:
        library.called()
    (warning,) = told
    assert str(warning.message) == ("Old.name is deprecated, and pccl 1.4 removes it; use New.name")
    assert warning.filename == __file__


def test_a_program_that_calls_it_is_named_itself() -> None:
    with pytest.warns(DeprecationWarning, match="use New.name") as told:
        warn_deprecated("Old.name", "New.name", "1.4")
    assert told[0].filename == __file__
