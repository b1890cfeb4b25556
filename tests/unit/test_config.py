"""What the environment says where an argument is not given; addresses of all kinds."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pccl import config
from pccl.addresses import Advertised, parse_address, parse_advertised, parse_proxies
from pccl.config import (
    resolve_advertise,
    resolve_drain,
    resolve_drain_s,
    resolve_encrypt,
    resolve_group,
    resolve_interface,
    resolve_lanes,
    resolve_listen,
    resolve_local,
    resolve_map_port,
    resolve_masters,
    resolve_min_peers,
    resolve_name,
    resolve_progress,
    resolve_stacks,
    resolve_token,
    resolve_upload_max,
)
from pccl.transports.base import Address
from tests.support.secret_files import keep

SECRET = "correct horse battery staple cloud"
PLAIN = ("MASTER", "GROUP", "LANES", "MIN_PEERS", "ADVERTISE", "LISTEN", "LOCAL", "MAP_PORT")
VARIABLES = (*PLAIN, "INTERFACE", "TOKEN", "TOKEN_FILE", "NAME", "STACKS", "UPLOAD_MAX")


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"PCCL_{name}", raising=False)


# -- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:48148", "127.0.0.1", 48148),
        ("[::1]:48148", "::1", 48148),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("myhost:0", "myhost", 0),
        ("a.example.org:65535", "a.example.org", 65535),
        ("localhost:5", "127.0.0.1", 5),
        ("h" * 63 + ".org.:5", "h" * 63 + ".org.", 5),
        ("gpu_07:5", "gpu_07", 5),
        ("müller.example:5", "müller.example", 5),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    ["", "host", ":5", "host:", "host:x", "host:65536", "host:-1", "::1:5", "[]:5", "a b:5",
     "[host:5", "http://host:5", "host:٣", "host:999999999999", "h" * 254 + ":1",
     "\0:1", "a\x1b:1", "\ud800:1", "h" * 64 + ".org:1", "a..b:1", ".:1", "ü" * 60 + ":1"],
)  # fmt: skip
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address; write HOST:PORT"):
        parse_address(text)
    with pytest.raises(TypeError, match="a string"):
        parse_address(48148)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("host", "host", None),
        ("10.1.2.3", "10.1.2.3", None),
        ("[2001:db8::1]", "2001:db8::1", None),
        ("localhost", "127.0.0.1", None),
        ("host:5000", "host", (5000, 5000)),
        ("host:5000-5010", "host", (5000, 5010)),
        ("[2001:db8::1]:5000-5010", "2001:db8::1", (5000, 5010)),
        (":5000", "", (5000, 5000)),
        (":5000-5000", "", (5000, 5000)),
    ],
)
def test_advertised(text: str, host: str, ports: tuple[int, int] | None) -> None:
    assert parse_advertised(text) == Advertised(host, ports)


@pytest.mark.parametrize(
    "text",
    ["", ":", "host:", "host:0", ":0", "host:9-8", "host:9-", "host:-9", "2001:db8::1", "host:1-x",
     "host:65536", "a b", "[]", "\0", "\ud800", "h" * 64, "h" * 64 + ":5"],
)  # fmt: skip
def test_wrong_advertised(text: str) -> None:
    with pytest.raises(ValueError, match=r"^advertise: .* is not an address; write HOST"):
        parse_advertised(text)
    with pytest.raises(ValueError, match=r"^listen: .* is not an address; write HOST"):
        parse_advertised(text, "listen")
    with pytest.raises(TypeError, match="listen is a string"):
        parse_advertised(5000, "listen")  # type: ignore[arg-type]


def test_proxies() -> None:
    found = parse_proxies("192.0.2.1, 10.0.0.0/24,2001:db8::1,fd00::/8")
    assert [str(one) for one in found] == [
        *("192.0.2.1/32", "10.0.0.0/24", "2001:db8::1/128", "fd00::/8")
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "'' names no proxy: .*; write the IP address from which the proxy connects"),
        ("192.0.2.1,", "'' names no proxy"),
        ("lb.example", "'lb.example' names no proxy"),
        ("192.0.2.1:443", "'192.0.2.1:443' names no proxy"),
        ("[::1]", r"'\[::1\]' names no proxy"),
        ("10.0.0.1/24", "'10.0.0.1/24' names no proxy: 10.0.0.1/24 has host bits set; write"),
        ("10.0.0.0/33", "'10.0.0.0/33' names no proxy"),
        ("192.0.2.1,0.0.0.0/0", "0.0.0.0/0 contains every address, so each process could claim"),
        ("::/0", "::/0 contains every address"),
    ],
)
def test_wrong_proxies(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_proxies(text)
    with pytest.raises(TypeError, match="proxies are a string"):
        parse_proxies(["192.0.2.1"])  # type: ignore[arg-type]


# -- the environment -----------------------------------------------------------------------------


def test_nothing_is_set() -> None:
    with pytest.raises(ValueError, match=r"Communicator\('HOST:PORT'\), or set PCCL_MASTER"):
        resolve_masters(None)
    assert resolve_group(None) == 0
    assert resolve_lanes(None, None) == 0
    assert resolve_listen(None) is None
    assert resolve_min_peers(None) == 1
    assert resolve_advertise(None) == Advertised("", None)
    assert resolve_token(None) is None
    assert resolve_local() == "auto"


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER", "[::1]:48148")
    monkeypatch.setenv("PCCL_GROUP", "3")
    monkeypatch.setenv("PCCL_LANES", "16")
    monkeypatch.setenv("PCCL_MIN_PEERS", "4")
    monkeypatch.setenv("PCCL_ADVERTISE", "host:5000-5001")
    monkeypatch.setenv("PCCL_LISTEN", ":6000")
    monkeypatch.setenv("PCCL_LOCAL", " any ")
    assert resolve_local() == "any"
    assert resolve_masters(None) == (Address("::1", 48148),)
    assert resolve_group(None) == 3
    assert resolve_lanes(None, None) == 16
    assert resolve_min_peers(None) == 4
    assert resolve_advertise(None) == Advertised("host", (5000, 5001))
    assert resolve_listen(None) == Advertised("", (6000, 6000))


def test_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(f"PCCL_{name}", "nonsense")
    assert resolve_masters("host:1") == (Address("host", 1),)
    assert resolve_group(0) == 0
    assert resolve_lanes(0, None) == 0
    assert resolve_lanes(None, 0) == 0
    assert resolve_listen("host") == Advertised("host", None)
    assert resolve_min_peers(1) == 1
    assert resolve_name("alice") == "alice"
    assert resolve_advertise(":7") == Advertised("", (7, 7))
    assert resolve_token(SECRET) == SECRET.encode()
    assert resolve_upload_max(64_000) == 64_000
    assert resolve_upload_max(0) is None


def test_each_variable_is_of_a_peer_or_a_setting() -> None:
    settings = {"PCCL_DRAIN", "PCCL_ENCRYPT", "PCCL_LOCAL", "PCCL_STACKS", "PCCL_PROGRESS"}
    settings |= {"PCCL_MAP_PORT", "PCCL_UPLOAD_MAX", "PCCL_DRAIN_S"}
    known = {value for name, value in vars(config).items() if name.isupper()} - {config.OF_A_PEER}
    texts = {value for value in known if isinstance(value, str)}
    assert texts - set(config.OF_A_PEER) == settings
    assert all(f"| ``{name}`` |" in (config.__doc__ or "") for name in texts)


@pytest.mark.skipif(not hasattr(socket, "SO_BINDTODEVICE"), reason="interfaces have names on Linux")
def test_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_interface() == resolve_interface("") == ""
    assert resolve_interface("lo") == "lo"
    monkeypatch.setenv("PCCL_INTERFACE", "lo")
    assert resolve_interface() == "lo"
    assert resolve_interface("") == ""
    with pytest.raises(
        ValueError, match=r"^interface: .* no network interface 'eth99'; it has .*lo"
    ):
        resolve_interface("eth99")
    monkeypatch.setenv("PCCL_INTERFACE", "l\to")
    with pytest.raises(ValueError, match=r"^PCCL_INTERFACE: this machine has no network interface"):
        resolve_interface()
    with pytest.raises(TypeError, match="interface must be a str, not int"):
        resolve_interface(1)  # type: ignore[arg-type]


def test_an_interface_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_BINDTODEVICE", raising=False)
    with pytest.raises(ValueError, match=r"^interface: only Linux .* set the address with"):
        resolve_interface("en0")


def test_lanes_have_two_names() -> None:
    assert resolve_lanes(5, None) == resolve_lanes(None, 5) == 5
    assert resolve_lanes(256, None) == resolve_lanes(None, 256) == 256
    with pytest.raises(ValueError, match="are the same setting; give only one"):
        resolve_lanes(5, 5)
    with pytest.raises(ValueError, match="p2p_connection_pool_size must be from 0 to 256, not 257"):
        resolve_lanes(257, None)
    with pytest.raises(ValueError, match="lanes must be from 0 to 256, not -1"):
        resolve_lanes(None, -1)


@pytest.mark.parametrize("name", PLAIN)
def test_empty_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"PCCL_{name}", "")
    test_nothing_is_set()


def _lanes(lanes: None) -> int:
    return resolve_lanes(None, lanes)


def _drain(drain: None) -> bool:
    return resolve_drain()


def _drain_s(drain_s: None) -> float:
    return resolve_drain_s()


def _encrypt(encrypt: None) -> bool:
    return resolve_encrypt()


def _local(local: None) -> str:
    return resolve_local()


def _progress(progress: None) -> bool:
    return resolve_progress()


def _stacks(stacks: None) -> bool:
    return resolve_stacks()


@pytest.mark.parametrize(
    ("name", "value", "resolve", "words"),
    [
        ("PCCL_MASTER", "host", resolve_masters, "PCCL_MASTER: 'host' is not an address"),
        ("PCCL_MASTER", "a:1,b:0", resolve_masters, "PCCL_MASTER: 'a:1,b:0' has port 0; write"),
        ("PCCL_GROUP", "x", resolve_group, "PCCL_GROUP must be a whole number, not 'x'"),
        ("PCCL_GROUP", "-1", resolve_group, "PCCL_GROUP must be from 0 to 4294967295, not -1"),
        ("PCCL_LANES", "1e3", _lanes, "PCCL_LANES must be a whole number"),
        ("PCCL_LANES", "257", _lanes, "PCCL_LANES must be from 0 to 256"),
        ("PCCL_MIN_PEERS", "0", resolve_min_peers, "PCCL_MIN_PEERS must be from 1 to"),
        ("PCCL_ADVERTISE", "a:0", resolve_advertise, "PCCL_ADVERTISE: 'a:0' is not an address"),
        ("PCCL_LISTEN", "a:0", resolve_listen, "PCCL_LISTEN: 'a:0' is not an address"),
        ("PCCL_TOKEN", "short", resolve_token, "PCCL_TOKEN: .* 5 bytes is too short; 16"),
        ("PCCL_TOKEN", "", resolve_token, "PCCL_TOKEN is empty: set it to the token of the run"),
        ("PCCL_TOKEN", '"a token with quotes"', resolve_token, "neither a brace, a quotation mark"),
        ("PCCL_DRAIN", "2", _drain, "PCCL_DRAIN must be 0 or 1, not '2'"),
        ("PCCL_DRAIN_S", "5s", _drain_s, "PCCL_DRAIN_S must be a number from 0 to 3600, not '5s'"),
        (
            "PCCL_DRAIN_S",
            "nan",
            _drain_s,
            "PCCL_DRAIN_S must be a number from 0 to 3600, not 'nan'",
        ),
        ("PCCL_ENCRYPT", "yes", _encrypt, "PCCL_ENCRYPT must be 0 or 1, not 'yes'"),
        ("PCCL_LOCAL", "TCP", _local, "PCCL_LOCAL must be auto, tcp or any, not 'TCP'"),
        ("PCCL_LOCAL", "x" * 99, _local, f"not '{'x' * 32}'"),
        ("PCCL_NAME", " ", resolve_name, "^PCCL_NAME: a name must not be empty, or begin or"),
        ("PCCL_NAME", "a\x1b[0m", resolve_name, "^PCCL_NAME: a name must consist of printable"),
        ("PCCL_NAME", "n" * 65, resolve_name, "^PCCL_NAME: a name must not be longer than 64"),
        ("PCCL_STACKS", "no", _stacks, "PCCL_STACKS must be 0 or 1, not 'no'"),
        ("PCCL_MAP_PORT", "no", resolve_map_port, "PCCL_MAP_PORT must be 0 or 1, not 'no'"),
        ("PCCL_PROGRESS", "yes", _progress, "PCCL_PROGRESS must be 0 or 1, not"),
        ("PCCL_UPLOAD_MAX", "8Mbit", resolve_upload_max, "^PCCL_UPLOAD_MAX: '8Mbit' .* are 1MB$"),
        ("PCCL_UPLOAD_MAX", "63KB", resolve_upload_max, "^PCCL_UPLOAD_MAX: .* 64000 .* not 63000"),
        ("PCCL_TOKEN_FILE", "/no/such/file", resolve_token, "PCCL_TOKEN_FILE: .*/no/such/file"),
    ],
)
def test_mistakes_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, resolve: Any, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        resolve(None)


@pytest.mark.parametrize(
    ("text", "argument", "maps"),
    [
        ("", None, True),
        ("1", None, True),
        ("0", None, False),
        ("0", True, True),
        ("1", False, False),
    ],
)
def test_whether_the_router_is_asked(
    monkeypatch: pytest.MonkeyPatch, text: str, argument: bool | None, maps: bool
) -> None:
    monkeypatch.setenv("PCCL_MAP_PORT", text)
    assert resolve_map_port(argument) is maps
    with pytest.raises(TypeError, match="map_port must be a bool, not int"):
        resolve_map_port(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("", None), ("0", None), ("5MB", 5_000_000), ("10M", 10 << 20), ("64000", 64_000)],
)
def test_the_limit_of_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, text: str, bytes_per_s: int | None
) -> None:
    assert resolve_upload_max(None) is None
    monkeypatch.setenv("PCCL_UPLOAD_MAX", text)
    assert resolve_upload_max(None) == bytes_per_s


@pytest.mark.parametrize(
    ("limit", "kind"), [(1, ValueError), (-1, ValueError), (1 << 80, ValueError), (5e6, TypeError)]
)
def test_what_is_no_limit(limit: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^upload_bytes_per_s_max must be "):
        resolve_upload_max(limit)


# -- names and stacks ------------------------------------------------------------------------------


def use_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))


@pytest.mark.parametrize("variable", [None, ""])
def test_a_peer_without_a_name_has_that_of_its_process(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    use_host(monkeypatch, "gpu-07")
    if variable is not None:
        monkeypatch.setenv("PCCL_NAME", variable)
    assert resolve_name(None) == f"gpu-07:{os.getpid()}"


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("h" * 64, "h" * 58),
        ("\u00eb" * 40, "\u00eb" * 29),
        ("gpu\n\x1b7", "gpu7"),
        ("gp\udcfcu", "gpu"),
        ("", "host"),
        ("\n", "host"),
    ],
)
def test_the_name_of_any_host_is_made_a_good_one(
    monkeypatch: pytest.MonkeyPatch, host: str, shown: str
) -> None:
    use_host(monkeypatch, host)
    monkeypatch.setattr(os, "getpid", lambda: 12345)
    assert resolve_name(None) == f"{shown}:12345"


def test_a_name_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_NAME", "rack 3, left")
    assert resolve_name(None) == "rack 3, left"


@pytest.mark.parametrize("name", ["", " alice", "al\nice"])
def test_a_wrong_name_names_the_argument(name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: a name must"):
        resolve_name(name)
    wrong: Any = 7
    with pytest.raises(TypeError, match=r"^name must be a str, not int$"):
        resolve_name(wrong)


@pytest.mark.parametrize(("text", "allowed"), [("", True), ("1", True), (" 0 ", False)])
def test_stacks(monkeypatch: pytest.MonkeyPatch, text: str, allowed: bool) -> None:
    assert resolve_stacks()
    monkeypatch.setenv("PCCL_STACKS", text)
    assert resolve_stacks() is allowed


# -- the secret ----------------------------------------------------------------------------------


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_token(f" {SECRET}\n") == SECRET.encode()
    assert resolve_token(bytes(range(240, 256))) == bytes(range(240, 256))
    path = tmp_path / "token"
    keep(path, "fifteen letters\n")
    monkeypatch.setenv("PCCL_TOKEN_FILE", str(path))
    with pytest.raises(ValueError, match=r"PCCL_TOKEN_FILE .*token': .* 15 bytes"):
        resolve_token(None)
    path.write_text("x" * 4097)
    with pytest.raises(ValueError, match="longer than 4096 bytes"):
        resolve_token(None)
    keep(path, f"{SECRET} in a file\n")
    assert resolve_token(None) == f"{SECRET} in a file".encode()
    monkeypatch.setenv("PCCL_TOKEN", SECRET)
    assert resolve_token(None) == SECRET.encode()
    monkeypatch.delenv("PCCL_TOKEN")
    monkeypatch.setenv("PCCL_TOKEN_FILE", str(tmp_path))
    with pytest.raises(ValueError, match="cannot read"):
        resolve_token(None)


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(ValueError, match=r"^token: this str has a lone surrogate"):
        resolve_token("sixteen or more \udc80")
    with pytest.raises(ValueError, match="too short") as caught:
        resolve_token("my secret")
    assert "my secret" not in str(caught.value)
    with pytest.raises(TypeError, match="must be str or bytes, not int") as wrong:
        resolve_token(1234567890123456)  # type: ignore[arg-type]
    assert "1234567890123456" not in str(wrong.value)
