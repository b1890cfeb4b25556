"""Both ends of one link: whatever is cut and whoever dials first, all lanes come up in the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.limits import Timing
from pccl.protocol.types import KEY_BYTES, Member, PeerId
from pccl.topology.link_steps import DialLane, DropLink, GiveUpLane, LinkStep
from pccl.topology.link_upkeep import LinkUpkeep

TIMING = Timing(redial_min_s=0.02, redial_max_s=0.5)
LANES = 3
ONE, TWO = (Member(PeerId(n), "a", n, key=bytes([n]) * KEY_BYTES) for n in (1, 2))
MS = 1_000_000


@dataclass(eq=False)
class Dialled:
    """A connection that an end has dialled; each end learns of things in its own time."""

    number: int
    is_open: bool = True


@dataclass(eq=False)
class End:
    """One end of the link, as the shell carries out what its upkeep decides."""

    own: Member
    other: Member
    world: World
    lanes: dict[int, Dialled] = field(default_factory=dict[int, Dialled])
    dials: dict[int, Dialled | None] = field(default_factory=dict[int, Dialled | None])
    """Number -> the connection of a dial under way; None: it waits, or is not connected yet."""

    def __post_init__(self) -> None:
        self.upkeep = LinkUpkeep(TIMING, LANES, newcomers_max=2)

    @property
    def there(self) -> End:
        return self.world.ends[self.other.peer]

    def carry_out(self, steps: Iterable[LinkStep]) -> None:
        for step in steps:
            match step:
                case DialLane(_, number, pause_ns):
                    assert number not in self.dials
                    self.dials[number] = None
                    if pause_ns:
                        self.world.at(pause_ns, partial(self.due, number))
                    else:
                        self.dial(number)
                case GiveUpLane(_, number, is_spare):
                    if number in self.dials:
                        self.abort(self.dials.pop(number))
                    assert not is_spare
                case DropLink():
                    raise AssertionError("it is wanted")
                case _:
                    pass

    def due(self, number: int) -> None:
        if self.dials.get(number, self) is None:
            del self.dials[number]
            self.carry_out(self.upkeep.due(self.other.peer, number))

    def dial(self, number: int) -> None:
        made = self.dials[number] = Dialled(number)
        self.world.soon(partial(self.connected, made))

    def connected(self, made: Dialled) -> None:
        if not self.is_dialling(made):
            return
        if self.upkeep.gives_way(self.other.peer, made.number):
            del self.dials[made.number]
        else:
            self.world.soon(partial(self.there.accept, made))

    def accept(self, made: Dialled) -> None:
        """The dialler has proven itself; the proof of this end goes back."""
        if made.is_open:
            steps = self.upkeep.greeted(self.other.peer, self.other.key, made.number, "host")
            assert steps is not None
            self.carry_out(steps)
            self.attach(made, ours=False)
        self.world.soon(partial(self.there.proven, made))

    def proven(self, made: Dialled) -> None:
        if not self.is_dialling(made):
            return
        del self.dials[made.number]
        if made.is_open:
            self.attach(made, ours=True)
        else:
            self.carry_out(self.upkeep.failed(self.other.peer, made.number, "reset"))

    def is_dialling(self, made: Dialled) -> bool:
        return self.dials.get(made.number) is made

    def attach(self, made: Dialled, *, ours: bool) -> None:
        more = bool(self.lanes)
        self.abort(self.lanes.get(made.number))
        self.lanes[made.number] = made
        facts = self.other.peer, made.number, LANES, self.world.now_ns
        self.carry_out(self.upkeep.attached(*facts, near=False, ours=ours, more=more))

    def abort(self, made: Dialled | None) -> None:
        if made is not None and made.is_open:
            made.is_open = False
            self.world.soon(partial(self.there.notice, made))

    def notice(self, made: Dialled) -> None:
        """A connection has ended."""
        if self.lanes.get(made.number) is made:
            del self.lanes[made.number]
            facts = self.other.peer, made.number, "reset", self.world.now_ns
            self.carry_out(self.upkeep.lost(*facts, up=bool(self.lanes), damaged=None))

    def tick(self) -> None:
        self.carry_out(self.upkeep.look(self.other.peer, (), 0, self.world.now_ns))


class World:
    """Both ends; what happens soon happens in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.now_ns = 0
        self.ends = {ONE.peer: End(ONE, TWO, self), TWO.peer: End(TWO, ONE, self)}
        self._rng = rng
        self._soon: list[Callable[[], None]] = []
        self._later: list[tuple[int, Callable[[], None]]] = []

    def soon(self, event: Callable[[], None]) -> None:
        self._soon.append(event)

    def at(self, pause_ns: int, event: Callable[[], None]) -> None:
        self._later.append((self.now_ns + pause_ns, event))

    def step(self) -> None:
        """One event, or some time."""
        if self._soon and self._rng.random() < 0.9:
            self._soon.pop(self._rng.randrange(len(self._soon)))()
        else:
            self.now_ns += self._rng.choice([MS, 20 * MS, 250 * MS])
            due = [one for one in self._later if one[0] <= self.now_ns]
            self._later = [one for one in self._later if one[0] > self.now_ns]
            for _, event in due:
                self.soon(event)
        if self._rng.random() < 0.05:
            self._rng.choice([*self.ends.values()]).tick()

    def cut(self) -> None:
        """Some connections end; both ends notice it."""
        some = {made for end in self.ends.values() for made in end.lanes.values()}
        for made in sorted(some, key=lambda made: made.number):
            if self._rng.random() < 0.7:
                made.is_open = False
                for end in self.ends.values():
                    self.soon(partial(end.notice, made))

    @property
    def is_whole(self) -> bool:
        one, two = (end.lanes for end in self.ends.values())
        return one == two and sorted(one) == [*range(LANES)] and not self._soon


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_all_lanes_come_up_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for end in world.ends.values():
        end.carry_out(end.upkeep.want(end.own.peer, [end.other], {}))
        end.carry_out(end.upkeep.use([end.other.peer]))
    for _ in range(3):
        for _ in range(rng.randrange(60)):
            world.step()
        world.cut()
    for _ in range(600):
        world.step()
    steps = 0
    while not world.is_whole:
        world.step()
        steps += 1
        assert steps < 2000
