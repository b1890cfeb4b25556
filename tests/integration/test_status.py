"""``pccl status`` and ``comm.status()``: a real master, real members, and those who only ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import socket
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl.cli import status_view
from pccl.errors import Evicted, LinkError, RemoteProtocolError, named
from pccl.inquiry import RemovalCause, master_status, to_json
from pccl.protocol.codec import encode
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.messages import StatusRequest
from tests.integration.conftest import Run
from tests.support.commands import environment_with, run_to_end
from tests.support.patience import LIMIT_S
from tests.support.secret_files import keep
from tests.support.waiting import until

TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pccl_status(ready_pccl: tuple[str, ...]) -> Command:
    """The command, with these arguments and variables."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = environment_with(**environment)
        return run_to_end(*ready_pccl, "status", *arguments, env=settings, limit_s=LIMIT_S)

    return run


# -- what programs are told ------------------------------------------------------------------------


def test_an_operation_that_waits_is_shown_to_others_and_to_its_caller(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(3)
    first, second, third = run.members
    run.check()
    waiting = [run.start(comm.all_reduce, np.ones(10_000), tag=7) for comm in (first, second)]
    run.until(lambda: run.requests == 2)
    seen = run.start(master_status, run.master.address).result(LIMIT_S)
    (operation,) = seen.operations
    assert (operation.what, operation.started) == ("tag 7 (SUM of 10000 x float64)", False)
    assert (operation.missing, operation.member_count) == ((third.peer_id,), 3)
    assert [one.calls for one in seen.members] == [operation.what, operation.what, ""]
    assert [one.rank for one in seen.members] == [0, 1, 2]
    assert all(one.connected for one in seen.members)

    own = first.status()
    who = f"peer {first.peer_id} ({own.members[0].name})"
    shown = f"<Status: {who}, member, members: 3, links: 2, open calls: 1, master "
    assert repr(own).startswith(f"{shown}{run.master.address} (silent for ")
    assert (own.peer_id, own.standing, own.term) == (first.peer_id, "member", 1)
    assert own.members == first.members()
    assert (own.master.address, own.master.connected) == (run.master.address, True)
    assert [(one.call, one.tag) for one in own.calls] == [("all_reduce", 7)]
    (transfer,) = own.transfers
    assert (transfer.tag, transfer.phase, transfer.received_segments) == (7, "requested", 0)
    assert transfer.segments == 4
    assert third.status().calls == ()

    third.all_reduce(np.ones(10_000), tag=7)
    for one in waiting:
        one.result(LIMIT_S)
    assert (first.status().calls, first.status().transfers) == ((), ())


def test_a_round_that_waits_long_says_for_whom(new_run: Callable[..., Run]) -> None:
    timing = pccl.Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, waiting_report_s=0.2)
    run = new_run(2, timing)
    first, second = run.members
    second.update_topology()  # went with its admission
    asked = run.start(first.update_topology)
    until(lambda: any(call.waits_for for call in first.status().calls))
    (call,) = first.status().calls
    assert (call.call, call.tag) == ("update_topology", None)
    assert call.waits_for == f"peer {second.peer_id} at 127.0.0.1 (in no call)"
    assert call.open_s > 0.0
    (opened,) = master_status(run.master.address).rounds
    assert (opened.requested_count, opened.missing) == (1, (second.peer_id,))
    second.update_topology()
    asked.result(LIMIT_S)


def test_who_left_is_shown_with_the_cause(new_run: Callable[..., Run]) -> None:
    run = new_run(3, name="carol")
    first, second, third = run.members
    waiting = [run.start(comm.all_reduce, np.ones(10)) for comm in (first, second)]
    run.until(lambda: run.requests == 2)
    gone = third.peer_id
    third.close()
    for one in waiting:
        assert isinstance(one.exception(LIMIT_S), pccl.errors.CollectiveAborted)
    (removal,) = master_status(run.master.address).removals
    assert (removal.peer, removal.cause, removal.reason) == (gone, RemovalCause.GOODBYE, "it left")
    told = [one.text for one in first.status().happened]
    assert f"peer {gone} (carol) left; the group has 2 members" in told
    aborted = f"all_reduce raised CollectiveAborted: tag 0: the run lost peer {gone} (carol)"
    assert any(text.startswith(aborted) for text in told)
    assert first.status().view > 0
    assert [one.peer_id for one in first.status().members] == [first.peer_id, second.peer_id]


def test_who_only_asks_is_no_peer(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    for _ in range(20):
        master_status(run.master.address)
    assert run.registered == 2
    assert master_status(run.master.address).newcomer_count == 0
    run.check()


def test_many_who_ask_and_never_read_do_not_disturb_the_run(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    host, _, port = run.master.address.rpartition(":")
    greeting = Opening(Channel.CONTROL).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            asker = stack.enter_context(socket.create_connection((host, int(port)), LIMIT_S))
            asker.sendall(greeting + 3 * encode(StatusRequest()))
        run.check()
        assert run.registered == 2
    assert len(master_status(run.master.address).members) == 2


def test_an_asyncio_member_knows_as_much(new_run: Callable[..., Run]) -> None:
    run = new_run()

    async def scenario() -> None:
        async with pccl.aio.Communicator(run.master.address) as comm:
            await comm.connect()
            status = comm.status()
            assert (status.standing, len(status.members), status.calls) == ("member", 1, ())

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


# -- what goes wrong -------------------------------------------------------------------------------


@contextlib.contextmanager
def listening() -> Generator[str]:
    """Somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_nobody_there_and_somebody_who_says_nothing() -> None:
    with listening() as address, pytest.raises(LinkError, match="not complete the pccl handshake"):
        master_status(address, timeout_s=0.2)
    with pytest.raises(LinkError, match=r"^master_status: .*cannot reach.*refused"):
        master_status(address, timeout_s=LIMIT_S)


def test_another_version_is_named(new_run: Callable[..., Run]) -> None:
    run = new_run()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        asking = run.start(master_status, address, timeout_s=LIMIT_S)
        asker, _ = server.accept()
        with asker:
            asker.sendall(Opening(Channel.CONTROL, version=999).encode())
            error = asking.exception(LIMIT_S)
    assert isinstance(error, RemoteProtocolError)
    assert error.reason.startswith("the other side has protocol version 999, ")


def test_the_token_is_asked_for() -> None:
    with pccl.MasterNode("127.0.0.1:0", token=TOKEN) as master:
        assert master_status(master.address, token=TOKEN).member_count == 0
        with pytest.raises(RemoteProtocolError, match="requires a token"):
            master_status(master.address)
        with pytest.raises(RemoteProtocolError, match="does not accept this token"):
            master_status(master.address, token=TOKEN[::-1])


def test_a_peer_is_no_master(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (member,) = run.members[0].members()
    with pytest.raises(RemoteProtocolError, match="a peer, not the master, listens at this"):
        master_status(f"{member.host}:{member.port}")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_in_lines_and_as_json(
    new_run: Callable[..., Run], pccl_status: Command
) -> None:
    run = new_run(2)
    first, second = run.members
    shown = pccl_status(run.master.address)
    assert (shown.returncode, shown.stderr) == (0, "")
    headline, *rest = shown.stdout.splitlines()
    assert headline.endswith(
        "2 members, 0 newcomers, 0 open rounds, 0 operations in flight, 0 removed"
    )
    assert rest[0].startswith("speed: ")
    rest = [line for line in rest[1:] if not line.startswith("slowest: ")]
    for rank, (line, member) in enumerate(zip(rest, (first, second), strict=False)):
        (name,) = [one.name for one in member.members() if one.peer_id == member.peer_id]
        assert line.startswith(
            f"member {member.peer_id} ({name}): group 0, rank {rank}, 127.0.0.1:"
        )
        assert line.endswith("no step, in no call")
    assert rest[2].startswith("group 0: 2 members, view ")
    assert rest[3].startswith("ended update_topology of all groups: ")

    told = json.loads(pccl_status("--json", PCCL_MASTER=run.master.address).stdout)
    assert [one["peer"] for one in told["members"]] == [first.peer_id, second.peer_id]
    assert told.keys() == to_json(master_status(run.master.address)).keys()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["nowhere"], 2, "is not an address"),
        ([], 2, "no live `pccl launch` or `pccl master` on this machine; for another master, give"),
        (["127.0.0.1:1", "--token", "/no/such/file"], 2, "No such file"),
        (["127.0.0.1:1", "--timeout", "5"], 1, "no status from 127.0.0.1:1: cannot reach"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], status: int, says: str, pccl_status: Command, tmp_path: Path
) -> None:
    ended = pccl_status(*arguments, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (status, "")
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_wrong_token_is_one_line_too(pccl_status: Command, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    keep(secret, TOKEN)
    with pccl.MasterNode("127.0.0.1:0", token=TOKEN) as master:
        good = pccl_status(master.address, "--token", str(secret))
        assert (good.returncode, good.stderr) == (0, "")
        bad = pccl_status(master.address, PCCL_TOKEN=TOKEN[::-1])
    assert bad.returncode == 1
    assert "the other side does not accept this token" in bad.stderr


def test_words_of_strangers_cannot_steer_a_terminal(
    new_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = master_status(new_run(1).master.address)
    (member,) = seen.members
    evil = replace(member, host="h", calls="[bold]")  # escapes are gone when it is decoded
    steered = replace(seen, members=(evil,))
    status_view.PlainView(as_json=False).show(steered)
    status_view.TableView().show(steered)
    shown = capsys.readouterr().out
    assert shown.count("[bold]") == 2


# -- the error that a removed peer gets ------------------------------------------------------------


def test_why_and_when_survive_naming_and_pickling() -> None:
    error = Evicted(reason="silent")
    error.cause, error.ago_s = RemovalCause.SILENT, 2.5
    again = pickle.loads(pickle.dumps(named(error, "barrier")))
    assert isinstance(again, Evicted)
    assert (again.cause, again.ago_s, again.func) == (RemovalCause.SILENT, 2.5, "barrier")
    assert str(again) == "barrier: silent [RANK_CONNECTION_LOST 8]"
