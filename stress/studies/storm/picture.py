"""The animated picture of a storm: a cell for each replica, coloured by what it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from pccl.stress.studies.storm.frames import ReplicaState, StormFrame, frames_of
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import TapeEvent

FRAMES_PER_S = 10
LAST_MS = 2500
"""How long the last frame stays."""

WIDTH, MARGIN = 800, 20
SCALE = 2
"""Frames are drawn larger by this factor, so that edges become smooth."""
GRID_TOP = 122
FEW = 64
"""Up to so many replicas the cells have 8 columns, otherwise 16."""

GROUND, PANEL = (15, 23, 42), (30, 41, 59)
TEXT, FAINT, ON_LIGHT = (248, 250, 252), (148, 163, 184), (6, 20, 12)
TOOK_PART = (74, 222, 128)
COLOURS = {
    ReplicaState.TRAINS: (21, 128, 61),
    ReplicaState.STARTS: (239, 68, 68),
    ReplicaState.CUT_OFF: (251, 191, 36),
    ReplicaState.STOPPED: (148, 163, 184),
    ReplicaState.NAPS: (167, 139, 250),
    ReplicaState.SLEEPS: (96, 165, 250),
}

LABELS = {ReplicaState.STARTS: "killed, restarting"}
"""Words of the legend, where they are not those of the cell."""
TRAINS = ReplicaState.TRAINS
SHADES = 5
"""Number of steps between two colours that are drawn together."""

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]


def write_picture(
    storm: Storm, events: Sequence[TapeEvent], path: Path, *, seconds: float = 12.0
) -> None:
    """Write the picture as an animated GIF; a tape always gives the same bytes.

    Args:
        storm: the storm.
        events: its tape.
        path: the file.
        seconds: duration of the picture, without the pause on the last frame.

    Raises:
        OSError: the file cannot be written.
    """
    frames = frames_of(storm, events, round(seconds * FRAMES_PER_S))
    painter = _Painter(storm, frames)
    first, *others = [painter.paint(frame) for frame in frames]
    durations = [1000 // FRAMES_PER_S] * len(others) + [LAST_MS]
    first.save(path, "GIF", save_all=True, append_images=others, duration=durations, loop=0)


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class _Pen:
    """Draws on an image; lengths are pixels of the picture."""

    def __init__(self, height: int) -> None:
        self._image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), GROUND)
        self._draw = ImageDraw.Draw(self._image)

    def text(
        self, left: float, top: float, words: str, size: int, ink: Colour = TEXT, anchor: str = "la"
    ) -> None:
        place = (left * SCALE, top * SCALE)
        self._draw.text(place, words, font=_font(size), fill=ink, anchor=anchor)

    def box(self, box: Box, ink: Colour, radius: float = 5) -> None:
        left, top, right, bottom = (round(one * SCALE) for one in box)
        outline = (left, top, right - 1, bottom - 1)
        self._draw.rounded_rectangle(outline, radius * SCALE, fill=ink)

    def line(self, points: Sequence[tuple[float, float]], ink: Colour) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self._draw.line(scaled, fill=ink, width=2 * SCALE, joint="curve")

    def finish(self, palette: Image.Image) -> Image.Image:
        """Return the picture, in the colours of a palette."""
        small = self._image.reduce(SCALE)
        return small.quantize(palette=palette, dither=Image.Dither.NONE)


class _Painter:
    """Paints frames of a storm. The layout depends on all of them."""

    def __init__(self, storm: Storm, frames: Sequence[StormFrame]) -> None:
        self._peers, self._duration_s = storm.timeline.peers, storm.timeline.duration_s
        self._faults_s = [one.at_s for one in storm.timeline.faults if one.at_s > 0]
        self._losses = [loss for _, loss in frames[-1].losses]
        used = {state for frame in frames for state in frame.states} | {ReplicaState.TRAINS}
        self._used = [state for state in COLOURS if state in used]
        self._columns, self._gap, self._cell_height = columns_of(self._peers), 8, 34
        if self._peers > FEW:
            self._gap, self._cell_height = 5, 24
        lines = -(-self._peers // self._columns)
        self._legend_top = GRID_TOP + lines * (self._cell_height + self._gap) + 6
        self._plot_top = self._legend_top + 36
        self._plot_bottom = self._plot_top + (100 if self._losses else 4)
        self._palette = _palette()

    def paint(self, frame: StormFrame) -> Image.Image:
        pen = _Pen(self._plot_bottom + 46)
        self._headline(pen, frame)
        for index in range(self._peers):
            self._cell(pen, frame, index)
        self._legend(pen)
        self._time(pen, frame)
        if frame.losses:
            self._loss(pen, frame)
        return pen.finish(self._palette)

    def _headline(self, pen: _Pen, frame: StormFrame) -> None:
        title = f"{self._peers} replicas train one model."
        if self._faults_s:
            title += " Some fail; the others continue."
        pen.text(MARGIN, 16, title, 22)
        share = "-" if frame.share_kept is None else f"{frame.share_kept:.1%}"
        tiles = {
            "time": f"{clock(frame.at_s)} of {clock(self._duration_s)}",
            "faults so far": str(frame.faults),
            "replicas in the last round": f"{len(frame.took_part)} of {self._peers}",
            "of the possible work kept": share,
        }
        width = (WIDTH - 2 * MARGIN + 8) / len(tiles)
        for place, (label, value) in enumerate(tiles.items()):
            left = MARGIN + place * width
            pen.box((left, 52, left + width - 8, 108), PANEL)
            pen.text(left + 12, 58, value, 22)
            pen.text(left + 12, 86, label, 13, FAINT)

    def _cell(self, pen: _Pen, frame: StormFrame, index: int) -> None:
        line, column = divmod(index, self._columns)
        width = (WIDTH - 2 * MARGIN + self._gap) / self._columns
        left = MARGIN + column * width
        top = GRID_TOP + line * (self._cell_height + self._gap)
        right, bottom = left + width - self._gap, top + self._cell_height
        state = frame.states[index]
        trains = state is ReplicaState.TRAINS
        took_part = trains and index in frame.took_part
        pen.box((left, top, right, bottom), TOOK_PART if took_part else COLOURS[state])
        word = str(index) if trains or self._peers > FEW else state.value
        ink = TEXT if trains and not took_part else ON_LIGHT
        pen.text((left + right) / 2, (top + bottom) / 2, word, 13, ink, "mm")

    def _legend(self, pen: _Pen) -> None:
        labels = {"its work is in the last round": TOOK_PART}
        labels |= {LABELS.get(state, state.value): COLOURS[state] for state in self._used}
        left, top = float(MARGIN), self._legend_top
        for label, ink in labels.items():
            pen.box((left, top + 2, left + 12, top + 14), ink, 3)
            pen.text(left + 18, top, label, 13, FAINT)
            left += 38 + _font(13).getlength(label) / SCALE

    def _time(self, pen: _Pen, frame: StormFrame) -> None:
        bottom = self._plot_bottom
        pen.box((MARGIN, bottom + 6, WIDTH - MARGIN, bottom + 12), PANEL, 0)
        pen.box((MARGIN, bottom + 6, self._x(frame.at_s) + 1, bottom + 12), COLOURS[TRAINS], 0)
        for at_s in self._faults_s:
            if at_s <= frame.at_s:
                x = self._x(at_s)
                pen.box((x - 1, bottom + 3, x + 1, bottom + 15), COLOURS[ReplicaState.STARTS], 0)
        pen.text(MARGIN, bottom + 19, "0:00; each red mark is a fault", 13, FAINT)
        pen.text(WIDTH - MARGIN, bottom + 19, clock(self._duration_s), 13, FAINT, "ra")

    def _loss(self, pen: _Pen, frame: StormFrame) -> None:
        least, most = min(self._losses), max(self._losses)
        top, height = self._plot_top + 8, self._plot_bottom - self._plot_top - 16
        points = [
            (self._x(at_s), top + height * (most - loss) / (most - least or 1.0))
            for at_s, loss in frame.losses
        ]
        x, y = points[-1]
        pen.line([*points, (self._x(frame.at_s), y)], TOOK_PART)
        pen.box((x - 3, y - 3, x + 3, y + 3), TOOK_PART, 3)
        label = f"loss on held-out text: {frame.losses[-1][1]:.2f}"
        pen.text(WIDTH - MARGIN, self._plot_top, label, 15, TEXT, "ra")

    def _x(self, at_s: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * min(1.0, at_s / self._duration_s)


def columns_of(peers: int) -> int:
    """Return the number of columns of the grid."""
    return min(peers, 8) if peers <= FEW else 16


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)


def _palette() -> Image.Image:
    """Return the colours of the picture, and those between each pair that is drawn together."""
    states = [TOOK_PART, *COLOURS.values()]
    pairs = [(GROUND, ink) for ink in (*states, TEXT, FAINT, PANEL)]
    pairs += [(PANEL, TEXT), (PANEL, FAINT), (COLOURS[TRAINS], TEXT)]
    pairs += [(ground, ON_LIGHT) for ground in states if ground != COLOURS[TRAINS]]
    colours = dict.fromkeys(
        tuple(round(a + (b - a) * part / SHADES) for a, b in zip(*pair, strict=True))
        for pair in pairs
        for part in range(SHADES + 1)
    )
    image = Image.new("P", (1, 1))
    image.putpalette([value for colour in colours for value in colour])
    return image
