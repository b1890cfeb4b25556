"""Draws groups of peers, and what they have measured of their links."""

from __future__ import annotations

from hypothesis import strategies as st

from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX
from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import PeerId

MEASURES = st.builds(
    LinkMeasure,
    st.sampled_from([0, 1, RTT_NS_MAX]) | st.integers(1_000, 500_000_000),
    st.sampled_from([0, 1, BYTES_PER_S_MAX]) | st.integers(10**5, 10**10),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[PeerId], dict[tuple[PeerId, PeerId], LinkMeasure]]:
    ring = [PeerId(peer) for peer in draw(st.permutations(range(1, draw(st.integers(2, 9)) + 1)))]
    pairs = [(one, other) for one in ring for other in ring if one != other]
    known = draw(st.lists(st.sampled_from(pairs), unique=True))
    return ring, {pair: draw(MEASURES) for pair in known}
