"""PCP: the bytes of RFC 6887, and answers that are not ours."""

from __future__ import annotations

import pytest

from pccl.protocol.port_mapping.answers import OtherVersion, PortDenied, PortGranted
from pccl.protocol.port_mapping.pcp import PortRequest

NONCE = bytes(range(12))
REQUEST = PortRequest(NONCE, "192.168.1.7", 48200)

SENT = bytes.fromhex(
    "02 01 0000 000004b0 00000000000000000000ffffc0a80107"  # version, MAP, 1200 s, own address
    "000102030405060708090a0b 06 000000 bc48 bc49 00000000000000000000ffff00000000"
)
GRANTED = bytes.fromhex(
    "02 81 00 00 00000258 00000064 000000000000000000000000"  # MAP, success, 600 s, epoch 100
    "000102030405060708090a0b 06 000000 bc48 bc4a 00000000000000000000ffffcb007107"
)


def changed(at: int, *values: int) -> bytes:
    """An answer with other bytes at an offset."""
    return GRANTED[:at] + bytes(values) + GRANTED[at + len(values) :]


def test_a_request() -> None:
    assert REQUEST.pack(48201, 1200) == SENT


def test_a_grant() -> None:
    assert REQUEST.read(GRANTED) == PortGranted("203.0.113.7", 48202, 600, 100)
    assert REQUEST.read(GRANTED + bytes(4)) == PortGranted("203.0.113.7", 48202, 600, 100)


def test_an_ipv6_address_stays_one() -> None:
    ipv6 = GRANTED[:-16] + bytes.fromhex("20010db8000000000000000000000001")
    assert REQUEST.read(ipv6) == PortGranted("2001:db8::1", 48202, 600, 100)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (2, "it allows this machine no ports (not authorized)"),
        (8, "it has no free ports (no resources)"),
        (12, "another router lies between it and this machine (address mismatch)"),
        (99, "result 99"),
    ],
)
def test_a_refusal(code: int, reason: str) -> None:
    assert REQUEST.read(changed(3, code)) == PortDenied(reason, 100)


@pytest.mark.parametrize(
    "data",
    [
        bytes.fromhex("0081000100000064"),  # NAT-PMP only (RFC 6886, section 3.5)
        bytes.fromhex("0080000100000064") + bytes(4),
        changed(3, 1),
        changed(0, 1, 0x81, 0, 1)[:24],  # an older PCP
    ],
)
def test_another_version(data: bytes) -> None:
    assert REQUEST.read(data) == OtherVersion()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\2",
        SENT,  # a request
        GRANTED[:59],
        GRANTED[:24],
        GRANTED + bytes(1100),
        changed(0, 3),
        changed(1, 0x01),  # not marked as an answer
        changed(1, 0x82),  # of another request: PEER
        changed(24, 1),  # another nonce
        changed(36, 17),  # UDP
        changed(40, 0, 80),  # another port
        bytes.fromhex("0081000000000064"),  # NAT-PMP, and no refusal
        bytes.fromhex("0001000100000064"),
        bytes.fromhex("00810001000000"),
    ],
)
def test_no_answer_to_this_request(data: bytes) -> None:
    assert REQUEST.read(data) is None
