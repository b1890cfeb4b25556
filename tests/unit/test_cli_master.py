"""What ``pccl master`` says about an address."""

import pytest

from pccl.cli.master import greeting


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_loopback_is_pointed_out(host: str) -> None:
    said = "\n".join(greeting(f"{host}:48148"))
    assert "this machine only" in said
    assert f'pccl.Communicator("{host}:48148")' in said


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_wildcard_is_nothing_to_dial(host: str) -> None:
    said = "\n".join(greeting(f"{host}:48148"))
    assert 'pccl.Communicator("HOST:48148")' in said
    assert "other machines" in said


@pytest.mark.parametrize("host", ["192.0.2.7", "master.example"])
def test_any_other_host_is_what_peers_dial(host: str) -> None:
    assert f'  on each peer: pccl.Communicator("{host}:1")' in greeting(f"{host}:1")
