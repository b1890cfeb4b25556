"""How a new master registers the peers of a run that it continues."""

from __future__ import annotations

from pccl.machines.master.connections import Caller
from pccl.machines.master.membership import RegisteredPeer
from pccl.machines.master.succession.recovered import Recovered
from pccl.machines.master.succession.report import Report
from pccl.machines.reachability import dialled_at
from pccl.protocol import messages as msg
from pccl.protocol.types import Member, PeerId


def revive(
    header: msg.Return,
    caller: Caller,
    connection: int | None,
    member: Member | None,
    now_ns: int,
) -> RegisteredPeer:
    """Return the registration of a returning peer, as the earlier master had it.

    Args:
        header: the peer's first message.
        caller: the process that has returned.
        connection: the peer's connection; None if it is closed already.
        member: the peer as a roster names it; None for a newcomer.
        now_ns: current time.
    """
    registration = header.registration
    host, hosts = dialled_at(registration.host, registration.hosts, caller.host)
    port, machine, name = registration.port, registration.machine, registration.name
    seen_as = Member(header.peer, host, port, machine, name, caller.key, hosts)
    return RegisteredPeer(
        header.peer, registration.group, member or seen_as,
        min_peers=registration.min_peers, masters=registration.masters,
        seen=caller.host, declared=registration.host, prefetching=registration.prefetches,
        admitted=member is not None, connection=connection, token=caller.token,
        control_lost_ns=None if connection is not None else now_ns,
        heard_ns=now_ns, pending_ns=now_ns, registered_ns=now_ns,
    )  # fmt: skip


def revive_all(recovered: Recovered, now_ns: int) -> list[RegisteredPeer]:
    """Return the registrations of all members, missing ones included, and of newcomers."""
    returned = {report.peer: report for report in recovered.returned}
    peers: list[RegisteredPeer] = []
    for peer, (group, member) in recovered.members.items():
        report = returned.get(peer)
        if report is None:
            peers.append(_absent(peer, group, member, now_ns))
        else:
            peers.append(_present(report, member, now_ns))
    return peers + [_present(report, None, now_ns) for report in recovered.newcomers]


def _present(report: Report, member: Member | None, now_ns: int) -> RegisteredPeer:
    return revive(report.header, report.caller, report.connection, member, now_ns)


def _absent(peer: PeerId, group: int, member: Member, now_ns: int) -> RegisteredPeer:
    return RegisteredPeer(
        peer, group, member, admitted=True, absent=True, control_lost_ns=now_ns,
        heard_ns=now_ns, pending_ns=now_ns, registered_ns=now_ns,
    )  # fmt: skip
