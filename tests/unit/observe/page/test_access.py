"""Who may see the page."""

from __future__ import annotations

import pytest

from pccl.observe.page.access import TOKEN_CHARACTERS_MAX, Access

TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_on_loopback_the_host_header_must_name_this_machine(host: str) -> None:
    access = Access(host, None)
    for good in ("127.0.0.1:80", "localhost:9000", "localhost", "[::1]:80", "[::1]"):
        assert access.accepts_host(good), good
    for bad in ("", "evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "10.0.0.1"):
        assert not access.accepts_host(bad), bad
    assert access.accepts_cookie(None)
    assert not access.accepts_token("")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "gpu-07"])
def test_beyond_loopback_it_takes_the_token(host: str) -> None:
    with pytest.raises(ValueError, match="the run needs a token"):
        Access(host, None)
    access = Access(host, TOKEN.encode())
    assert access.accepts_host("gpu-07:80")
    assert access.accepts_token(TOKEN)
    assert access.accepts_token(f" {TOKEN}\n")
    for wrong in ("", TOKEN[:-1], TOKEN + "x", "\ud800", "x" * (TOKEN_CHARACTERS_MAX + 1)):
        assert not access.accepts_token(wrong)
    assert access.accepts_cookie(access.cookie)
    for other in (None, "", TOKEN, "\xff", Access(host, TOKEN.encode()).cookie):
        assert not access.accepts_cookie(other)
