"""Reads and checks the environment variables that replace arguments.

| variable | replaces |
| --- | --- |
| ``PCCL_MASTER`` | the master, ``HOST:PORT`` |
| ``PCCL_GROUP`` | ``peer_group`` |
| ``PCCL_LANES`` | ``lanes``, ``p2p_connection_pool_size`` |
| ``PCCL_MIN_PEERS`` | ``min_peers`` of ``connect`` |
| ``PCCL_PEERS`` | number of peers of this launch; ``pccl launch`` sets it |
| ``PCCL_ADVERTISE`` | ``advertise`` |
| ``PCCL_LISTEN`` | ``listen`` |
| ``PCCL_INTERFACE`` | ``interface`` |
| ``PCCL_MAP_PORT`` | ``map_port``, 0 or 1 |
| ``PCCL_TOKEN`` | ``token``: the secret itself |
| ``PCCL_TOKEN_FILE`` | a file that contains the token; ``PCCL_TOKEN`` takes precedence |
| ``PCCL_DRAIN`` | 1: on SIGTERM, leave the run before the program ends (``draining``) |
| ``PCCL_DRAIN_S`` | seconds after SIGTERM in which a wrapper may still contribute its work |
| ``PCCL_LOCAL`` | how processes of one machine exchange tensors: ``auto``, ``tcp``, ``any`` |
| ``PCCL_NAME`` | ``name`` |
| ``PCCL_UPLOAD_MAX`` | ``upload_bytes_per_s_max``, with a unit: ``10M`` |
| ``PCCL_METRICS`` | where this process serves metrics: ``PORT``, ``HOST:PORT`` or ``auto`` |
| ``PCCL_ENCRYPT`` | 1: encrypt connections inside this machine, too; others always are |
| ``PCCL_STACKS`` | 0: never send the stacks of the threads (:mod:`pccl.inquiry`) |
| ``PCCL_STACKS_DIR`` | folder for stacks (:mod:`pccl.observe.process`); commands set it |
| ``PCCL_RECORD`` | folder for records, which a peer writes on failure and SIGQUIT |
| ``PCCL_PROGRESS`` | 1: show progress of long fetches of shared state (:mod:`pccl.progress`) |

An argument takes precedence over its variable, even if it is 0. Except for ``PCCL_TOKEN``, an empty
variable counts as not set. A mistake raises ValueError or TypeError, which names the argument or
the variable.
"""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path

from pccl.addresses import Advertised, parse_address, parse_advertised, parse_masters
from pccl.checks import (
    LANES_MAX,
    MIN_PEERS_MAX,
    PEER_GROUP_MAX,
    check_range,
    check_upload,
    parse_size,
)
from pccl.protocol.guards.guessing import GUESS_BITS_MIN, guess_bits
from pccl.protocol.handshake.token import TOKEN_PREFIX, parse_token
from pccl.protocol.types import NAME_BYTES_MAX
from pccl.telemetry.names import name_flaw
from pccl.transports.base import Address
from pccl.transports.datagrams import interface_names

MASTER = "PCCL_MASTER"
GROUP = "PCCL_GROUP"
LANES = "PCCL_LANES"
MIN_PEERS = "PCCL_MIN_PEERS"
PEERS = "PCCL_PEERS"
ADVERTISE = "PCCL_ADVERTISE"
LISTEN = "PCCL_LISTEN"
INTERFACE = "PCCL_INTERFACE"
MAP_PORT = "PCCL_MAP_PORT"
TOKEN = "PCCL_TOKEN"
TOKEN_FILE = "PCCL_TOKEN_FILE"
DRAIN = "PCCL_DRAIN"
DRAIN_S = "PCCL_DRAIN_S"
LOCAL = "PCCL_LOCAL"
NAME = "PCCL_NAME"
ENCRYPT = "PCCL_ENCRYPT"
STACKS = "PCCL_STACKS"
RECORD = "PCCL_RECORD"
PROGRESS = "PCCL_PROGRESS"
UPLOAD_MAX = "PCCL_UPLOAD_MAX"
METRICS = "PCCL_METRICS"
STACKS_DIR = "PCCL_STACKS_DIR"

OF_A_PEER = (
    *(MASTER, GROUP, LANES, MIN_PEERS, PEERS, ADVERTISE, LISTEN, TOKEN, TOKEN_FILE),
    *(INTERFACE, NAME, RECORD, METRICS, STACKS_DIR),
)
"""Variables that describe a peer and its run. The others are settings, for any run."""

DRAIN_DEFAULT_S = 5
DRAIN_MAX_S = 3600

SECRET_BYTES_MIN = 16
"""Shorter secrets are too easy to guess, whatever characters they have (``guessing``)."""

SECRET_BYTES_MAX = 4096
"""Largest length of a secret; a longer file is probably the wrong file."""


def resolve_masters(address: str | None) -> tuple[Address, ...]:
    """Return the addresses of the master and its standbys.

    Raises:
        TypeError, ValueError: an address is malformed, or no address is given.
    """
    if address is not None:
        return parse_masters(address)
    text = os.environ.get(MASTER)
    if not text:
        raise ValueError(
            f"no master: give its address, as in Communicator('HOST:PORT'), or set {MASTER}; "
            "`pccl launch` and `pccl join` set it"
        )
    try:
        return parse_masters(text)
    except ValueError as error:
        raise ValueError(f"{MASTER}: {error}") from None


def resolve_group(peer_group: int | None) -> int:
    """Return the number of the peer group; 0 by default."""
    return _resolve_number("peer_group", peer_group, GROUP, 0, PEER_GROUP_MAX, default=0)


def resolve_lanes(pool_size: int | None, lanes: int | None) -> int:
    """Return the number of connections per link; 0 (the library chooses) by default."""
    if pool_size is not None and lanes is not None:
        raise ValueError("lanes and p2p_connection_pool_size are the same setting; give only one")
    name = "p2p_connection_pool_size" if lanes is None else "lanes"
    given = pool_size if lanes is None else lanes
    return _resolve_number(name, given, LANES, 0, LANES_MAX, default=0)


def resolve_min_peers(min_peers: int | None) -> int:
    """Return the number of members that ``connect`` waits for, this one included; by default 1."""
    return _resolve_number("min_peers", min_peers, MIN_PEERS, 1, MIN_PEERS_MAX, default=1)


def resolve_advertise(advertise: str | None) -> Advertised:
    """Return the address at which other peers reach this one."""
    if advertise is not None:
        return parse_advertised(advertise, "advertise")
    text = os.environ.get(ADVERTISE)
    return parse_advertised(text, ADVERTISE) if text else Advertised()


def resolve_listen(listen: str | None) -> Advertised | None:
    """Return the address that this peer binds; None: it binds the advertised port."""
    if listen is not None:
        return parse_advertised(listen, "listen")
    text = os.environ.get(LISTEN)
    return parse_advertised(text, LISTEN) if text else None


def resolve_interface(interface: str | None = None) -> str:
    """Return the network interface that this process listens at and dials from; empty: any.

    Raises:
        TypeError: ``interface`` is no str.
        ValueError: this machine has no such interface, or the system binds no socket to one.
    """
    if interface is not None and not isinstance(interface, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"interface must be a str, not {type(interface).__name__}")
    name = os.environ.get(INTERFACE, "") if interface is None else interface
    if not name:
        return ""
    argument = INTERFACE if interface is None else "interface"
    try:
        names = interface_names()
    except OSError as error:
        raise ValueError(f"{argument}: {error}; set the address with listen instead") from None
    if name not in names:
        raise ValueError(
            f"{argument}: this machine has no network interface {name[:64]!r}; "
            f"it has {', '.join(names)}"
        )
    return name


def resolve_map_port(map_port: bool | None = None) -> bool:
    """Whether this peer may ask its router to forward its port; True by default.

    Raises:
        TypeError: ``map_port`` is no bool.
        ValueError: the variable is neither 0 nor 1.
    """
    if map_port is None:
        return _switched_on(MAP_PORT, "1")
    if not isinstance(map_port, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"map_port must be a bool, not {type(map_port).__name__}")
    return map_port


def resolve_name(name: str | None) -> str:
    """Return the name of this peer: as given, else ``host:pid``.

    Raises:
        TypeError: ``name`` is no str.
        ValueError: the name is empty, too long, or has characters that cannot be printed.
    """
    if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    given = os.environ.get(NAME) if name is None else name
    if not given and name is None:
        host = "".join(filter(str.isprintable, os.uname().nodename)) or "host"
        return numbered_name(host, f":{os.getpid()}")
    if flaw := name_flaw(given or ""):
        raise ValueError(f"{NAME if name is None else 'name'}: {flaw}")
    return given or ""


def numbered_name(name: str, number: str) -> str:
    """Return a name and an ASCII number after it; the name is cut if both are too long."""
    return name.encode()[: NAME_BYTES_MAX - len(number)].decode("utf-8", "ignore") + number


def resolve_drain() -> bool:
    """Whether to leave the run on SIGTERM before the program ends; False by default.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return _switched_on(DRAIN)


def resolve_drain_s() -> float:
    """Return how many seconds after SIGTERM a wrapper may still contribute its work; 5 by default.

    Raises:
        ValueError: the variable is not a number from 0 to 3600.
    """
    text = os.environ.get(DRAIN_S) or f"{DRAIN_DEFAULT_S}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= DRAIN_MAX_S:
        raise ValueError(f"{DRAIN_S} must be a number from 0 to {DRAIN_MAX_S}, not {text[:32]!r}")
    return seconds


def resolve_encrypt() -> bool:
    """Whether this process encrypts connections inside this machine, too; False by default.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return _switched_on(ENCRYPT)


def resolve_local() -> str:
    """Return how processes of one machine exchange tensors.

    ``auto``, the default: they read each other's memory if the system allows it. ``any``: the same,
    and every process of the same user may read this one's memory. ``tcp``: they use TCP only.

    Raises:
        ValueError: the variable has another value.
    """
    text = (os.environ.get(LOCAL) or "auto").strip()
    if text not in ("auto", "tcp", "any"):
        raise ValueError(f"{LOCAL} must be auto, tcp or any, not {text[:32]!r}")
    return text


def resolve_metrics(metrics: str | None = None) -> Address | None:
    """Return the address at which this process serves metrics; None: it serves none.

    ``PORT`` and ``:PORT`` mean loopback; ``auto`` means a free port of loopback, as port 0 does.

    Args:
        metrics: the address; None: as in the environment.

    Raises:
        ValueError: the text has none of these forms.
    """
    text = os.environ.get(METRICS, "") if metrics is None else metrics
    if not text and metrics is None:
        return None
    try:
        number = "0" if text == "auto" else text.removeprefix(":")
        return parse_address(f"127.0.0.1:{number}" if number.isdigit() else text)
    except ValueError:
        raise ValueError(
            f"{METRICS if metrics is None else 'metrics'} must be PORT, HOST:PORT or auto, "
            f"not {text!r}; PORT alone means that only this machine can read the metrics"
        ) from None


def resolve_progress() -> bool:
    """Whether fetches without a listener show a progress bar; False by default.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return _switched_on(PROGRESS)


def resolve_record() -> Path | None:
    """Return the folder for records; None: this process writes none.

    Raises:
        ValueError: there is no such folder, or this process may not write there.
    """
    text = os.environ.get(RECORD)
    if not text:
        return None
    if not os.path.isdir(text) or not os.access(text, os.W_OK | os.X_OK):
        raise ValueError(f"{RECORD}: {text!r} is no folder in which this process may write")
    return Path(text).absolute()


def resolve_stacks() -> bool:
    """Whether a process with the token may ask for the stacks of the threads; True by default.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return _switched_on(STACKS, "1")


def _switched_on(variable: str, default: str = "0") -> bool:
    text = os.environ.get(variable) or default
    if text.strip() not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {text!r}")
    return text.strip() == "1"


def resolve_token(token: str | bytes | None) -> bytes | None:
    """Return the token of a run (``parse_token``), or a plain secret; None: none is set.

    White space around the secret is ignored, so a file may end with a line break.

    Raises:
        TypeError: ``token`` is neither str nor bytes.
        ValueError: the token is malformed, or a secret is too short, too long, or easy to guess. Or
            its file cannot be read, or other users of the machine can read it.
    """
    if token is not None:
        return _secret("token", token)
    text = os.environ.get(TOKEN)
    if text is not None:
        return _secret(TOKEN, text)
    path = os.environ.get(TOKEN_FILE)
    return read_token_file(path, TOKEN_FILE) if path else None


def read_token_file(path: str | os.PathLike[str], name: str = "token file") -> bytes:
    """Return the secret in a file.

    Args:
        path: path of the file.
        name: argument or variable that errors name.

    Raises:
        ValueError: the file cannot be read, has no good secret, or other users have access to it.
    """
    if os.fsencode(path).startswith(TOKEN_PREFIX):
        raise ValueError(
            f"{name}: this is a token, not a file, and other users of the machine can see it; give "
            f"it by {TOKEN}, in a file, or on stdin (-)"
        )
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(f"{name}: cannot read {os.fspath(path)!r}: {error.strerror}") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        raise ValueError(
            f"{name}: other users may read or change {os.fspath(path)!r} (mode "
            f"{stat.S_IMODE(mode):o}); chmod 600 {os.fspath(path)}, and if they may have read it, "
            "make another secret"
        )
    return _secret(f"{name} {os.fspath(path)!r}", content)


def _secret(name: str, token: str | bytes) -> bytes:
    if not isinstance(token, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be str or bytes, not {type(token).__name__}")
    try:
        secret = (token.encode() if isinstance(token, str) else token).strip()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name}: this str has a lone surrogate, which UTF-8 cannot encode; pass the secret as "
            "bytes, or make a new one with `pccl master --token auto`"
        ) from None
    if not secret:
        raise ValueError(f"{name} is empty: set it to the token of the run, or unset it")
    if secret.startswith((b"{", b'"', b"'", codecs.BOM_UTF8)):
        raise ValueError(
            f"{name}: a token begins with neither a brace, a quotation mark nor a byte order mark; "
            "give the bare line that `pccl token make` prints"
        )
    try:
        if parse_token(secret).number:
            return secret
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(
            f"{name}: a secret of {len(secret)} bytes is too short; {SECRET_BYTES_MIN} or "
            "more are needed; `pccl master --token auto` makes one"
        )
    if len(secret) > SECRET_BYTES_MAX:
        raise ValueError(f"{name}: the secret is longer than {SECRET_BYTES_MAX} bytes; shorten it")
    if guess_bits(secret) < GUESS_BITS_MIN:
        raise ValueError(
            f"{name}: this secret is too easy to guess for a process that has once answered a "
            "handshake; use `pccl master --token auto`, or six random words"
        )
    return secret


def resolve_upload_max(bytes_per_s: int | None) -> int | None:
    """Return how many bytes per second a peer or master sends at most; None: no limit.

    Raises:
        TypeError, ValueError: the argument or the variable is malformed, or out of range.
    """
    if bytes_per_s is not None:
        return check_upload("upload_bytes_per_s_max", bytes_per_s)
    text = os.environ.get(UPLOAD_MAX)
    try:
        return parse_upload_max(text) if text else None
    except ValueError as error:
        raise ValueError(f"{UPLOAD_MAX}: {error}") from None


def parse_upload_max(text: str) -> int | None:
    """Return the limit that a text such as ``10M`` names; None: 0, no limit.

    Raises:
        ValueError: not a size, or out of range.
    """
    if text.strip() == "0":
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ValueError(f"{error}. The limit is in bytes per second: 8 Mbit/s are 1MB") from None
    return check_upload("the limit", size)


def _resolve_number(
    name: str, value: int | None, variable: str, lowest: int, highest: int, *, default: int
) -> int:
    if value is not None:
        return check_range(name, value, lowest, highest)
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a whole number, not {text!r}") from None
    return check_range(variable, number, lowest, highest)
