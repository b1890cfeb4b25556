"""Who may see the page."""

from __future__ import annotations

import pytest

from pccl.observe.page.access import Access


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_on_loopback_the_host_header_must_name_this_machine(host: str) -> None:
    access = Access(host)
    for good in ("127.0.0.1:80", "localhost:9000", "localhost", "[::1]:80", "[::1]"):
        assert access.accepts_host(good), good
    for bad in ("", "evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "10.0.0.1"):
        assert not access.accepts_host(bad), bad
    assert access.code == ""
    assert access.accepts(None)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "gpu-07"])
def test_beyond_loopback_it_takes_the_code_of_this_page(host: str) -> None:
    access = Access(host)
    assert access.accepts_host("gpu-07:80")
    assert len(access.code) >= 43
    assert access.accepts(access.code)
    wrong = (None, "", access.code[:-1], access.code + "x", "\ud800", "x" * 100_000)
    for code in (*wrong, Access(host).code):
        assert not access.accepts(code)
