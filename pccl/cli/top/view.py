"""The lines that ``pccl top`` shows, for any size of the screen. Pure.

Peers choose their names and calls. ``Text`` takes no markup from them, and the decoder of messages
has replaced unprintable characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pccl.cli.top.model import Model
from pccl.inquiry import EndedStatus, LinkSpeed, MasterStatus, MemberStatus
from pccl.observe import summary
from pccl.observe.summary import Names, duration, size, who
from pccl.progress import counted

US_PER_MS = 1000

STYLES = {"lost": "bold red", "awaited": "yellow", "waits": "cyan", "works": "green"}
"""Styles of the states: colours that every terminal has."""

KEYS = "q quit  s S sort  r reverse  up down choose  Enter or number: details  Esc back"

SECTION_LINES_MAX = 4
SECTION_LINES_MIN = 2
"""Lines of each section below the members: fewer if not all members fit above them."""

MEMBERS_LINES_MIN = 4
"""Lines that the members get, however small the screen is."""


def lines(model: Model, width: int, height: int, now_s: float) -> list[Text]:
    """Return exactly ``height`` lines of ``width`` cells.

    Args:
        model: what to show.
        width: cells of a line.
        height: lines of the screen.
        now_s: time by the clock of ``model.answered_s``.
    """
    head = _head(model, now_s)
    room = max(height - len(head) - 1, 0)
    body = [Text("waiting for the first answer")] if not model.trouble else []
    if model.status is not None:
        body = _details(model, model.status) if model.details else _overview(model, room)
        if model.trouble:
            for line in body:
                line.stylize("dim")
    foot = Text(f"peer {model.typed}_  Esc back" if model.typed else KEYS, style="reverse")
    shown = [*head, *body[:room], *(Text() for _ in range(room - len(body))), foot]
    return [_fitted(line, width) for line in shown][:height]


def _fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def _head(model: Model, now_s: float) -> list[Text]:
    title = Text(f"pccl top  {model.master}", style="bold")
    status = model.status
    if status is not None:
        about = f"  run {status.run.hex()[:8]}  term {status.term}"
        title.append(f"{about}  up {duration(status.uptime_ms * US_PER_MS)}")
    head = [title]
    if model.trouble:
        age = ""
        if status is not None:
            age = f"the state of {duration((now_s - model.answered_s) * 1e6)} ago; "
        head.append(Text(f"{age}{model.trouble}", style="bold red"))
    if status is None:
        return head
    if status.waits_for:
        head.append(Text(f"this master coordinates no run: {status.waits_for}", style="yellow"))
    speed = summary.throughput(status)
    head.append(
        Text(
            f"{counted(status.member_count, 'member')}  "
            f"{counted(status.newcomer_count, 'newcomer')}  {status.removal_count} removed  "
            f"{speed.calls_per_s:.1f} calls/s  {size(speed.bytes_per_s)}/s"
        )
    )
    if slow := summary.slowest(status):
        head.append(
            Text(
                f"slowest: {who(summary.names_of(status), slow.peer)}, last in {slow.calls} of "
                f"{slow.of} calls, {duration(slow.late_us)} late on average",
                style="yellow",
            )
        )
    return head


# -- the whole run ---------------------------------------------------------------------------------


def _overview(model: Model, room: int) -> list[Text]:
    assert model.status is not None
    names = summary.names_of(model.status)
    sections = [
        ("WAITS", _waits(model.status, names)),
        ("ENDED", [_ended(call, names) for call in model.status.ended]),
        ("LINKS, THE SLOWEST FIRST", [_link(link, names) for link in _slow_first(model.status)]),
    ]
    below: list[Text] = []
    fits_all = model.status.member_count + 1 + 3 * (SECTION_LINES_MAX + 1) <= room
    most = SECTION_LINES_MAX if fits_all else SECTION_LINES_MIN
    free = room - 1 - min(model.status.member_count, MEMBERS_LINES_MIN)
    for title, found in sections:
        fits = min(len(found), most, free - len(below) - 1)
        if fits > 0:
            below += [Text(title, style="bold"), *found[:fits]]
    return [*_members(model, room - len(below)), *below]


def _members(model: Model, room: int) -> list[Text]:
    """Return the table of the members, as far as it fits; the chosen member is always in it."""
    members = model.members()
    columns = ("peer", "name", "host", "rank", "step", "steps/s", "state")
    rows = [_row(member) for member in members]
    widths = [max(map(cell_len, column)) for column in zip((*columns, "in"), *rows, strict=True)]
    widths = [*widths[:1], min(widths[1], 16), min(widths[2], 21), *widths[3:7], 0]
    heading = Text("  ", style="bold")
    for place, (name, cells) in enumerate(zip((*columns, "in"), widths, strict=True)):
        is_sorted = name == model.sort
        cell = _cell(place, name, cells)
        heading.append(cell, style="underline" if is_sorted else "")
        heading.append(("v" if model.descending else "^") if is_sorted else " ")
    shown_max = max(room - 1, 0)
    first = max(0, min(model.place() - shown_max // 2, len(rows) - shown_max))
    shown = [heading]
    for index in range(first, min(first + shown_max, len(rows))):
        is_chosen = index == model.place()
        line = Text("> " if is_chosen else "  ", style="bold" if is_chosen else "")
        style = STYLES[summary.state(members[index])]
        for place, (text, cells) in enumerate(zip(rows[index], widths, strict=True)):
            line.append(_cell(place, text, cells), style=style if place == 6 else "")
            line.append(" ")
        shown.append(line)
    return shown


def _cell(place: int, text: str, cells: int) -> str:
    if not cells:  # the last column has no width
        return text
    is_number = place in (0, 3, 4, 5)
    return text.rjust(cells) if is_number else set_cell_size(text, cells)


def _row(member: MemberStatus) -> tuple[str, ...]:
    speed = summary.steps_per_s(member)
    state = summary.state(member)
    if member.awaited_ms is not None:
        state += f" {duration(member.awaited_ms * US_PER_MS)}"
    return (
        str(member.peer),
        member.name,
        f"{member.host}:{member.port}",
        f"{member.group}/{member.rank}",
        str(member.step or "-"),
        f"{speed:.3g}" if speed else "-",
        state,
        member.calls or "-",
    )


def _waits(status: MasterStatus, names: Names) -> list[Text]:
    found: list[Text] = []
    for opened in status.rounds:
        missing = _missing(opened.missing, opened.missing_count, names)
        waited = duration(opened.waiting_ms * US_PER_MS)
        found.append(Text(f"  {waited:>8}  {opened.round.kind.call_name} waits for {missing}"))
    for operation in status.operations:
        missing = _missing(operation.missing, operation.missing_count, names)
        verb = "moves; not done:" if operation.started else "waits for"
        waited = duration(operation.open_ms * US_PER_MS)
        found.append(Text(f"  {waited:>8}  {operation.what} {verb} {missing}"))
    for newcomer in status.newcomers:
        waited = duration(newcomer.waiting_ms * US_PER_MS)
        why = names.explain(newcomer.waits_for)
        found.append(Text(f"  {waited:>8}  newcomer {who(names, newcomer.peer)} waits for {why}"))
    return found


def _missing(peers: Sequence[int], count: int, names: Names) -> str:
    shown = [who(names, peer) for peer in peers[:3]]
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")


def _ended(call: EndedStatus, names: Names) -> Text:
    late = f"last {who(names, call.last)} +{duration(call.late_us)}"
    ago = duration(call.ago_ms * US_PER_MS)
    line = Text(f"  {ago:>8} ago  {duration(call.took_us):>7}  ")
    line.append(summary.outcome(call), style="green" if call.cause is None else "red")
    return line.append(f"  {late}  {call.what}")


def _slow_first(status: MasterStatus) -> list[LinkSpeed]:
    return sorted(status.links, key=lambda link: link.bytes_per_s or float("inf"))


def _link(link: LinkSpeed, names: Names) -> Text:
    speed = f"{size(link.bytes_per_s)}/s" if link.bytes_per_s else "unknown"
    rtt = duration(link.rtt_us) if link.rtt_us else "unknown"
    ends, path = summary.pair(link, names), summary.path(link, names).path
    return Text(f"  {speed:>11}  round trip {rtt:>7}  {ends}, {path}")


def _why_not_better(link: LinkSpeed, names: Names) -> list[Text]:
    _, why, remedy = summary.path(link, names)
    return [Text(f"      {text}", style="dim") for text in (why, remedy) if text]


# -- one member ------------------------------------------------------------------------------------


def _details(model: Model, status: MasterStatus) -> list[Text]:
    names = summary.names_of(status)
    members = model.members()
    chosen = model.chosen if model.chosen is not None else members[0].peer if members else None
    member = next((one for one in members if one.peer == chosen), None)
    if member is None:
        gone = [one for one in status.removals if one.peer == chosen]
        why = f"{gone[0].cause.name}, {names.explain(gone[0].reason)}" if gone else "not listed"
        return [Text(f"peer {chosen} is no member any more: {why}", style="red")]
    awaited = "no"
    if member.awaited_ms is not None:
        awaited = f"for {duration(member.awaited_ms * US_PER_MS)}"
    heard = f"{duration(member.silent_ms * US_PER_MS)} ago"
    last = f"{member.last_call}, {duration(member.last_call_ms * US_PER_MS)} ago"
    facts = (
        ("peer", who(names, member.peer)),
        ("state", summary.state(member)),
        ("address", f"{member.host}:{member.port}"),
        ("group, rank", f"{member.group}, {member.rank}"),
        ("heard", heard if member.connected else f"{heard}; NOT CONNECTED"),
        ("awaited", awaited),
        ("progress", summary.progress(member)),
        ("in", member.calls or "no call"),
        ("last call", last if member.last_call else "none"),
    )
    shown = [Text(f"  {name:<12}").append(text, style="bold") for name, text in facts]
    links = [link for link in _slow_first(status) if member.peer in (link.peer, link.other)]
    late = [call for call in status.ended if call.last == member.peer]
    for title, found in (
        ("LAST TO CALL IN", [_ended(call, names) for call in late[:SECTION_LINES_MAX]]),
        (
            "LINKS, THE SLOWEST FIRST",
            [
                line
                for link in links[:SECTION_LINES_MAX]
                for line in (_link(link, names), *_why_not_better(link, names))
            ],
        ),
    ):
        shown += [Text(title, style="bold"), *(found or [Text("  none")])]
    return shown
