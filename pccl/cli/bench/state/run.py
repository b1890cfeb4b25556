"""From a plan of ``pccl bench state`` to figures: starts the processes, and hears them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import pccl
from pccl import config
from pccl.cli.bench.crew import Crew, ProcessDied
from pccl.cli.bench.peers.words import Doing, Report
from pccl.cli.bench.run import (
    HOST,
    RELAY_SAYS,
    failure_of,
    free_ports,
    last_objects,
    listen,
    start_relay,
)
from pccl.cli.bench.state.figures import (
    Figure,
    hashing_figures,
    join_figure,
    part_of,
    played_figure,
    with_ratios,
)
from pccl.cli.bench.state.plan import JOIN_MEMBERS, StatePlan
from pccl.cli.bench.state.words import Case, Gathering, JoinMeasured, JoinTask, Played, StateTask

Tell = Callable[[str], None]


def measure_hashing(crew: Crew, plan: StatePlan) -> list[Figure]:
    """In a process of its own, while nothing else of ours runs.

    Raises:
        click.ClickException: it failed.
    """
    arguments = ["--bytes", str(plan.size), "--rounds", str(plan.rounds)]
    try:
        crew.start("hashing", "pccl.stress.studies.hashing", arguments)
        [found] = last_objects(crew, ["hashing"])
    except ProcessDied as death:
        raise failure_of(death) from death
    return hashing_figures(plan.size, found)


def measure_loopback(crew: Crew, plan: StatePlan, tell: Tell) -> list[Figure]:
    """All that is moved, or not, without an emulated link.

    Raises:
        click.ClickException: a process failed.
    """
    cases = plan.loopback_cases
    played = _play(crew, plan, cases, plan.size, "", tell)
    return with_ratios(
        [played_figure(case, part_of(case), plan.size, *played[case]) for case in cases]
    )


def measure_uplinks(crew: Crew, plan: StatePlan, tell: Tell) -> list[Figure]:
    """What is fetched from sources whose uplinks are limited.

    Raises:
        click.ClickException: a process failed.
    """
    cases, size = plan.uplink_cases, plan.uplink_size
    played = _play(crew, plan, cases, size, plan.uplink, tell)
    return with_ratios([played_figure(case, "uplinks", size, *played[case]) for case in cases])


def _play(
    crew: Crew, plan: StatePlan, cases: Sequence[Case], size: int, uplink: str, tell: Tell
) -> dict[Case, tuple[list[Played], list[Played]]]:
    """What sources and joiners have said of each case."""
    sources = max(case.sources for case in cases)
    joiners = max(case.joiners for case in cases)
    kinds = sorted({(case.sources, case.joiners) for case in cases})
    names = _names(sources, joiners)
    found: dict[Case, dict[str, Played]] = {case: {} for case in cases}

    def add(name: str, report: Report) -> None:
        match report:
            case Doing():
                tell(f"{report.part}, {report.round} rounds done")
            case Played():
                found[cases[report.case]][name] = report
            case _:
                raise AssertionError("no such report is made")

    with contextlib.ExitStack() as stack:
        token, control = _master(stack)
        gatherings = [Gathering(*kind, _master(stack, token)[1]) for kind in kinds]
        doors = dict.fromkeys(names, gatherings)
        if uplink:
            doors = stack.enter_context(uplinks(crew, uplink, names, gatherings))
        ports = asyncio.run(free_ports(1)) if Case("copy") in cases else [0]
        for name, (joins, number) in names.items():
            task = StateTask(
                joins=joins,
                number=number,
                sources=sources,
                joiners=joiners,
                control=control,
                bytes=size,
                rounds=plan.rounds,
                warmup=plan.warmup,
                gatherings=tuple(doors[name]),
                cases=tuple(cases),
                port=ports[0],
            )
            environment = {config.TOKEN: token}
            crew.start(name, "pccl.cli.bench.state.peer", [task.to_json()], environment)
        listen(crew, list(names), add)
    return {
        case: (
            [said[name] for name in names if name in said and not names[name][0]],
            [said[name] for name in names if name in said and names[name][0]],
        )
        for case, said in found.items()
    }


def measure_joins(crew: Crew, plan: StatePlan, tell: Tell) -> list[Figure]:
    """What members of a run lose while somebody joins, with and without fetching before.

    Each join has processes of its own.

    Raises:
        click.ClickException: a process failed.
    """
    found: dict[bool, list[list[JoinMeasured]]] = {False: [], True: []}
    for number in range(plan.rounds):
        for prefetches, joins in found.items():
            tell(f"{number + 1} of {plan.rounds} joins")
            joins.append(_join(crew, plan, prefetches=prefetches))
    return [
        join_figure(plan.uplink_size, joins, prefetches=prefetches)
        for prefetches, joins in found.items()
    ]


def _join(crew: Crew, plan: StatePlan, *, prefetches: bool) -> list[JoinMeasured]:
    names = _names(JOIN_MEMBERS, 1)
    found: list[JoinMeasured] = []

    def add(name: str, report: Report) -> None:
        assert isinstance(report, JoinMeasured)
        found.append(report)

    with contextlib.ExitStack() as stack:
        token, control = _master(stack)
        gathering = Gathering(JOIN_MEMBERS, 1, _master(stack, token)[1])
        doors = stack.enter_context(uplinks(crew, plan.uplink, names, [gathering]))
        for name, (joins, number) in names.items():
            task = JoinTask(
                joins=joins,
                number=number,
                sources=JOIN_MEMBERS,
                joiners=1,
                control=control,
                bytes=plan.uplink_size,
                rounds=1,
                gatherings=tuple(doors[name]),
                compute_s=plan.compute_s,
                prefetches=prefetches,
            )
            environment = {config.TOKEN: token}
            crew.start(name, "pccl.cli.bench.state.join", [task.to_json()], environment)
        listen(crew, list(names), add)
    return found


def _names(sources: int, joiners: int) -> dict[str, tuple[bool, int]]:
    """For each process whether it joins, and which of its kind it is."""
    return {f"source {number}": (False, number) for number in range(sources)} | {
        f"joiner {number}": (True, number) for number in range(joiners)
    }


def _master(stack: contextlib.ExitStack, token: str = "") -> tuple[str, str]:
    """Start one in this process; its token and address."""
    token = token or secrets.token_urlsafe(32)
    return token, stack.enter_context(pccl.MasterNode(f"{HOST}:0", token=token)).address


@contextlib.contextmanager
def uplinks(
    crew: Crew,
    spec: str,
    names: dict[str, tuple[bool, int]],
    gatherings: Sequence[Gathering],
) -> Generator[dict[str, list[Gathering]], None, None]:
    """Put a relay before the doors of the processes.

    Whoever joins dials, so all that a source sends goes through the relay before its door, which is
    one link for all of them: its uplink.

    Args:
        crew: starts the relays.
        spec: what each uplink is like, in their words.
        names: of the processes; whether they join, and which of their kind they are.
        gatherings: in which they take part.

    Yields:
        For each process the gatherings with its doors.

    Raises:
        click.ClickException: a relay did not start.
    """
    places = [
        (name, at)
        for name, (joins, number) in names.items()
        for at, gathering in enumerate(gatherings)
        if number < (gathering.joiners if joins else gathering.sources)
    ]
    listens = [f"{HOST}:{port}" for port in asyncio.run(free_ports(len(places)))]
    relays = [f"relay before {name}, {at}" for name, at in places]
    for relay, target in zip(relays, listens, strict=True):
        start_relay(crew, relay, spec, target)
    try:
        said = crew.first_lines(relays) if relays else {}
    except ProcessDied as death:
        raise failure_of(death) from death
    doors = {name: list(gatherings) for name in names}
    for (name, at), target, relay in zip(places, listens, relays, strict=True):
        door = said[relay].removeprefix(RELAY_SAYS)
        doors[name][at] = replace(doors[name][at], listen=target, advertise=door)
    yield doors
    crew.dismiss(relays)
