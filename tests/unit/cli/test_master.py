"""What ``pccl master`` says about an address."""

import click
import pytest

from pccl.cli.master import greeting, refuse_to_be_open


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
    said = greeting(f"{host}:1")
    assert f'    or in Python: pccl.Communicator("{host}:1")' in said
    assert f"    pccl join {host}:1 -- python train.py" in said


def test_a_new_token_is_something_to_paste() -> None:
    said = greeting("192.0.2.7:1", "it's mine", secured=True)
    assert """    PCCL_TOKEN='it'"'"'s mine' pccl join 192.0.2.7:1 -- python train.py""" in said
    said = greeting("192.0.2.7:1", secured=True)
    assert "    set PCCL_TOKEN, or PCCL_TOKEN_FILE, to a token of this run" in said
    assert not any("PCCL_TOKEN" in line for line in greeting("192.0.2.7:1"))


def test_peers_are_told_of_both_masters() -> None:
    said = greeting("192.0.2.7:1", standby="192.0.2.8:2")
    assert "    pccl join 192.0.2.7:1,192.0.2.8:2 -- python train.py" in said
    said = greeting("0.0.0.0:2", standby_of="192.0.2.7:1")
    assert "  a standby: it begins no run, but takes over the run of 192.0.2.7:1" in said
    assert '    or in Python: pccl.Communicator("192.0.2.7:1,HOST:2")' in said


@pytest.mark.parametrize("listen", ["127.0.0.1:48148", "0.0.0.0:48148", "10.0.0.1:48148"])
def test_behind_a_proxy_peers_dial_the_proxy(listen: str) -> None:
    said = greeting(listen, ends=True, proxied=True)
    assert "  reachable through a proxy; HOST:443: where the proxy listens" in said
    assert "    pccl join HOST:443 -- python train.py" in said
    assert any("the run ends with this master" in line for line in said)
    assert not any("this machine only" in line for line in said)
    with pytest.raises(click.BadParameter, match="any process that reaches the proxy could join"):
        refuse_to_be_open(listen, "10.0.0.9")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1"])
def test_nobody_else_reaches_loopback(address: str) -> None:
    refuse_to_be_open(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "my-host:1"])
def test_anything_else_is_open(address: str) -> None:
    with pytest.raises(click.BadParameter):
        refuse_to_be_open(address)
