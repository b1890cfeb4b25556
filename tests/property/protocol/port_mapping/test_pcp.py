"""Whatever arrives, PCP raises nothing, and takes no answer without the nonce."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.port_mapping.answers import OtherVersion, PortDenied, PortGranted
from pccl.protocol.port_mapping.pcp import PortRequest
from tests.support.home_router import HomeRouter

PORTS = st.integers(1, 65535)


@given(data=st.binary(max_size=1200), nonce=st.binary(min_size=12, max_size=12), port=PORTS)
def test_garbage(data: bytes, nonce: bytes, port: int) -> None:
    answer = PortRequest(nonce, "10.0.0.7", port).read(data)
    assert isinstance(answer, PortGranted | PortDenied | OtherVersion | None)
    if isinstance(answer, PortGranted | PortDenied):
        assert nonce in data


@given(port=PORTS, wanted=PORTS, lifetime_s=st.integers(60, (1 << 32) - 1), code=st.integers(0, 20))
def test_a_router_understands_the_request(
    port: int, wanted: int, lifetime_s: int, code: int
) -> None:
    router = HomeRouter(result=code)
    request = PortRequest(bytes(12), "10.0.0.7", port)
    (data,) = router.answers(request.pack(wanted, lifetime_s))
    answer = request.read(data)
    if code == 0:
        assert answer == PortGranted(router.host, wanted, min(lifetime_s, 7200), 1000)
    elif code == 1:
        assert answer == OtherVersion()
    else:
        assert isinstance(answer, PortDenied)


@given(at=st.integers(0, 59), by=st.integers(1, 255))
def test_a_changed_byte_is_noticed_where_it_names_the_request(at: int, by: int) -> None:
    request = PortRequest(bytes(range(12)), "10.0.0.7", 48200)
    (data,) = HomeRouter().answers(request.pack(48200, 1200))
    good = request.read(data)
    bad = bytearray(data)
    bad[at] ^= by
    answer = request.read(bytes(bad))
    if at in (1, *range(24, 37), 40, 41):
        assert answer is None
    else:
        assert answer != good or at in (2, *range(12, 24), *range(37, 40))
