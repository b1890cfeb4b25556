"""NAT-PMP: the bytes of RFC 6886, and answers that are not ours."""

from __future__ import annotations

import pytest

from pccl.protocol.port_mapping import nat_pmp
from pccl.protocol.port_mapping.answers import PortDenied, PortGranted, RouterAddress

PORT = 48200
ADDRESS = bytes.fromhex("0080 0000 00000064 cb007107")
GRANTED = bytes.fromhex("0082 0000 00000064 bc48 bc4a 00000258")


def test_requests() -> None:
    assert bytes.fromhex("0000") == nat_pmp.ADDRESS_REQUEST
    assert nat_pmp.pack_map(PORT, 48201, 1200) == bytes.fromhex("0002 0000 bc48 bc49 000004b0")
    assert nat_pmp.pack_map(PORT, 0, 0) == bytes.fromhex("0002 0000 bc48 0000 00000000")


def test_answers() -> None:
    assert nat_pmp.read(ADDRESS, PORT) == RouterAddress("203.0.113.7", 100)
    assert nat_pmp.read(GRANTED, PORT) == PortGranted("", 48202, 600, 100)


@pytest.mark.parametrize(
    "data",
    [
        bytes.fromhex("0080 0003 00000064"),
        bytes.fromhex("0080 0003 00000064 00000000"),
        bytes.fromhex("0082 0003 00000064 bc48 0000 00000000"),
        bytes.fromhex("0082 0003 00000064"),
    ],
)
def test_a_refusal(data: bytes) -> None:
    reason = "it has no connection to the internet (network failure)"
    assert nat_pmp.read(data, PORT) == PortDenied(reason, 100)


def test_an_unknown_refusal() -> None:
    assert nat_pmp.read(bytes.fromhex("0082 0009 00000064"), PORT) == PortDenied("result 9", 100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ADDRESS[:7],
        ADDRESS[:11],
        GRANTED[:15],
        GRANTED + bytes(1100),
        b"\1" + GRANTED[1:],  # another version
        b"\0\2" + GRANTED[2:],  # a request
        b"\0\x81" + GRANTED[2:],  # for UDP
        GRANTED[:8] + b"\0\x50" + GRANTED[10:],  # another port
        bytes.fromhex("0082 0002 00000064 0050 0000 00000000"),  # a refusal of another port
    ],
)
def test_no_answer_to_these_requests(data: bytes) -> None:
    assert nat_pmp.read(data, PORT) is None
