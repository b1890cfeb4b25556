"""Names, shapes and chains of published versions."""

from __future__ import annotations

import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.publication.versions import PublishedVersion, StateName, VersionDelta
from pccl.state.delta import delta_layout
from pccl.state.layout import Entry, StateLayout
from pccl.state.versions import (
    chain_to,
    fits_deltas,
    kept_deltas,
    name_and_shape,
    shaped,
    version_operation,
)


def delta(number: int, nbytes: int = 1) -> VersionDelta:
    before, after = b"%d" % (number - 1), b"%d" % number
    return VersionDelta(before, after, StateName(b"d", after), nbytes)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (1, 1, 1)])
def test_an_entry_tells_its_shape(shape: tuple[int, ...]) -> None:
    count = 1
    for length in shape:
        count *= length
    entry = shaped(Entry("a\0b", DataType.FLOAT, count), shape)
    assert name_and_shape(entry) == ("a\0b", shape)


@pytest.mark.parametrize("name", ["a", "a\0" + "2x2", "a\0" + "-3x-2", "a\0x"])
def test_other_entries_have_no_shape(name: str) -> None:
    with pytest.raises(ValueError, match=r"shape|invalid literal"):
        name_and_shape(Entry(name, DataType.FLOAT, 6))


def test_states_of_other_layouts_have_other_operations() -> None:
    one, two = (version_operation(StateName(layout, b"c"), 0) for layout in (b"a", b"b"))
    assert one.tag != two.tag
    assert one.term > 0  # so that its sender is to blame for a wrong piece


def test_a_chain_leads_from_what_is_held() -> None:
    chain = (delta(2), delta(3), delta(4))
    version = PublishedVersion(4, StateName(b"l", b"4"), 100, None, chain)
    assert chain_to(version, StateName(b"l", b"2"), ()) == chain[1:]
    assert chain_to(version, StateName(b"l", b"1"), ()) == chain
    assert chain_to(version, StateName(b"l", b"0"), ()) == ()
    assert chain_to(version, StateName(b"other", b"3"), ()) == ()
    assert chain_to(version, None, ()) == ()
    assert chain_to(version, StateName(b"l", b"2"), {delta(3)}) == ()


def test_only_few_and_cheap_deltas_are_kept() -> None:
    chain = [delta(number, 10) for number in range(20)]
    assert kept_deltas(chain, 1000, 8) == tuple(chain[-8:])
    assert kept_deltas(chain, 60, 8) == tuple(chain[-3:])
    assert kept_deltas(chain, 19, 8) == ()


def test_deltas_that_fit_a_layout() -> None:
    layout = StateLayout([Entry("a", DataType.FLOAT, 3), Entry("b", DataType.UINT8, 2)])
    assert fits_deltas(layout, delta_layout([12, 0]))
    assert not fits_deltas(layout, delta_layout([13, 0]))
    assert not fits_deltas(layout, delta_layout([12]))
    wide = StateLayout([Entry("", DataType.FLOAT, 2), Entry("", DataType.UINT8, 0)])
    assert not fits_deltas(layout, wide)
