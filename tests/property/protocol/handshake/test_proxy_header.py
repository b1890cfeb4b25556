"""The headers of proxies: what they say, in any split, and nothing behind them is read."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.opening import PREFIX_BYTES
from pccl.protocol.handshake.proxy_header import (
    FIXED_BYTES,
    SIGNATURE,
    ProxyHeader,
    begins_header,
    is_named,
)
from pccl.protocol.limits import PROXY_FIELDS_BYTES_MAX
from tests.support import proxy_headers as wire
from tests.support.proxy_headers import fields_of, header, proxied

PROXY = "10.0.0.9"
HOSTS = st.ip_addresses().filter(
    lambda host: not (host.is_multicast or host.is_unspecified or host.is_loopback)
)
PORTS = st.integers(0, 65535)
TLVS = st.binary(max_size=PROXY_FIELDS_BYTES_MAX - 36)
SEEDS = st.integers(0, 1 << 32)


def read(
    data: bytes, proxy: str = PROXY, rng: Random | None = None
) -> tuple[tuple[str, int] | None, int]:
    """What a header says, and how many bytes were read for it, in any split."""
    found, at = ProxyHeader(proxy), 0
    while found.awaited_bytes:
        assert found.source is None
        most = min(found.awaited_bytes, len(data) - at)
        assert most, "the header is not complete"
        nbytes = most if rng is None else rng.randint(1, most)
        found.receive(data[at : at + nbytes])
        at += nbytes
    return found.source, at


@given(HOSTS, PORTS, TLVS, st.binary(max_size=300), SEEDS)
def test_the_source_is_what_the_proxy_says(
    host: IPv4Address | IPv6Address, port: int, more: bytes, behind: bytes, seed: int
) -> None:
    sent = proxied(str(host), port, more)
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    assert read(sent + behind, rng=Random(seed)) == ((str(mapped or host), port), len(sent))


@given(st.binary(max_size=PROXY_FIELDS_BYTES_MAX), st.integers(0, 255), SEEDS)
def test_a_proxy_that_connects_on_its_own_names_no_source(
    fields: bytes, kind: int, seed: int
) -> None:
    """Its header may say anything else."""
    sent = header(fields, kind, wire.LOCAL)
    assert read(sent + b"PCCL", rng=Random(seed)) == (None, len(sent))


@pytest.mark.parametrize("kind", [0x00, 0x01, 0x02, 0x10, 0x12, 0x20, 0x22, 0x30, 0x31, 0x32])
@pytest.mark.parametrize("length", [0, 12, 36, 216, PROXY_FIELDS_BYTES_MAX])
def test_what_is_no_tcp_over_ip_has_no_source(kind: int, length: int) -> None:
    sent = header(b"\x0a" * length, kind)
    assert read(sent) == (None, len(sent))


@given(st.binary(max_size=2000), st.booleans(), SEEDS)
def test_garbage_is_refused_or_bounded(noise: bytes, has_signature: bool, seed: int) -> None:
    """Nothing but the documented error, and never more than the longest header."""
    data = (SIGNATURE if has_signature else b"") + noise + bytes(2000)
    try:
        _, nbytes = read(data, rng=Random(seed))
    except RemoteProtocolError:
        return
    assert has_signature
    assert FIXED_BYTES <= nbytes <= FIXED_BYTES + PROXY_FIELDS_BYTES_MAX


@given(st.sampled_from([proxied("192.0.2.7"), proxied("2001:db8::7")]), SEEDS)
def test_a_changed_header_is_refused_or_bounded(data: bytes, seed: int) -> None:
    rng = Random(seed)
    at, value = rng.randrange(len(data)), rng.randrange(256)
    changed = data[:at] + bytes([value]) + data[at + 1 :]
    try:
        _, nbytes = read(changed + bytes(2000), rng=rng)
    except RemoteProtocolError:
        return
    assert FIXED_BYTES <= nbytes <= FIXED_BYTES + PROXY_FIELDS_BYTES_MAX


REFUSED = {
    "a handshake": (b"PCCL\x0e\0", "it sent no PROXY header: let it send version 2, or remove it"),
    "its first byte": (b"P", "it sent no PROXY header"),
    "a web browser": (b"GET / HTTP/1.1\r\n", "it sent no PROXY header"),
    "an almost right signature": (SIGNATURE[:-1] + b"\r", "it sent no PROXY header"),
    "version 1": (b"PROXY TCP4 192.0", "version 1 of the PROXY header: let it send version 2"),
    "version 3": (header(command=0x31), "version 3, command 1"),
    "an unknown command": (header(command=0x22), "version 2, command 2"),
    "an unknown family": (header(kind=0x41), "family 4, transport 1"),
    "an unknown transport": (header(kind=0x13), "family 1, transport 3"),
    "the longest length": (header(length=65535), "announces 65535 bytes of fields; at most 1024"),
    "a length above the limit": (header(length=1025), "announces 1025 bytes of fields"),
    "a long local one": (header(command=wire.LOCAL, length=1025), "announces 1025 bytes"),
    "too short for IPv4": (header(bytes(11)), "11 bytes, too few for its addresses"),
    "too short for IPv6": (header(bytes(35), wire.TCP6), "35 bytes, too few for its addresses"),
    "multicast": (proxied("224.0.0.1"), "names the source 224.0.0.1, which no host has"),
    "multicast over IPv6": (proxied("ff02::1"), "names the source ff02::1"),
    "mapped multicast": (proxied("::ffff:224.0.0.1"), "names the source 224.0.0.1"),
    "unspecified": (proxied("0.0.0.0"), "names the source 0.0.0.0"),
    "unspecified over IPv6": (proxied("::"), "names the source ::,"),
}


@pytest.mark.parametrize(("sent", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_bad_header_is_refused_as_soon_as_it_shows(sent: bytes, reason: str) -> None:
    """None of these waits for bytes that may never come."""
    with pytest.raises(RemoteProtocolError) as refused:
        read(sent)
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    ("proxy", "source", "is_told"),
    [
        ("127.0.0.2", "127.0.0.1", True),
        ("127.0.0.2", "::1", True),
        ("::1", "127.0.0.1", True),
        ("10.0.0.9", "127.0.0.1", False),
        ("10.0.0.9", "::ffff:127.0.0.1", False),
        ("fe80::1%eth0", "::1", False),
        ("a host", "::1", False),
        ("127.0.0.2", "192.0.2.7", True),
    ],
)
def test_the_loopback_of_another_machine_is_no_source(
    proxy: str, source: str, is_told: bool
) -> None:
    """The connection then comes from the proxy, whose machine it is."""
    assert read(proxied(source, 5), proxy)[0] == ((source, 5) if is_told else None)


@given(st.ip_addresses(), st.integers(0, 128))
def test_a_network_names_what_is_in_it(host: IPv4Address | IPv6Address, prefix: int) -> None:
    network = ip_network((host, min(prefix, host.max_prefixlen)), strict=False)
    mapped = isinstance(host, IPv6Address) and host.ipv4_mapped is not None
    assert is_named(str(host), [network]) is not mapped
    assert not is_named(str(host), [])


def test_what_is_no_address_is_named_by_no_network() -> None:
    everything = [ip_network("0.0.0.0/1"), ip_network("::/1")]
    hosts = ("a host", "", "10.0.0", "peer 3 through the master")
    assert [is_named(host, everything) for host in hosts] == [False] * len(hosts)
    assert is_named("fe80::1%eth0", [ip_network("fe80::/10")])
    assert is_named("::ffff:10.0.0.1", [ip_network("10.0.0.0/8")])


def test_a_header_of_an_unknown_process_is_recognized_in_both_versions() -> None:
    first = (proxied("192.0.2.7")[:PREFIX_BYTES], b"PROXY UN", b"PCCL\x0e\0..", b"\r\n\r\n\r\n\r\n")
    assert [begins_header(data) for data in first] == [True, True, False, False]
    assert ip_address("192.0.2.7").packed == fields_of("192.0.2.7", 1)[:4]
