"""Whatever arrives, NAT-PMP raises nothing, and takes no answer for another port."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.port_mapping import nat_pmp
from pccl.protocol.port_mapping.answers import PortDenied, PortGranted, RouterAddress
from tests.support.home_router import HomeRouter

PORTS = st.integers(1, 65535)


@given(data=st.binary(max_size=64), port=PORTS)
def test_garbage(data: bytes, port: int) -> None:
    answer = nat_pmp.read(data, port)
    assert isinstance(answer, PortGranted | PortDenied | RouterAddress | None)


@given(port=PORTS, other=PORTS, lifetime_s=st.integers(60, (1 << 32) - 1))
def test_a_router_understands_the_request(port: int, other: int, lifetime_s: int) -> None:
    router = HomeRouter()
    (data,) = router.answers(nat_pmp.pack_map(port, port, lifetime_s))
    granted = PortGranted("", port, min(lifetime_s, 7200), 1000)
    assert nat_pmp.read(data, port) == granted
    assert nat_pmp.read(data, other) == (granted if other == port else None)
    (data,) = router.answers(nat_pmp.ADDRESS_REQUEST)
    assert nat_pmp.read(data, port) == RouterAddress(router.host, 1000)
