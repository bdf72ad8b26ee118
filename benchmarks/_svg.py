"""Figures as SVG: panels of dots over rows of words, and of lines, laid out in one column that is read on a phone.

A figure is data (`Figure`, `Dots`, `Lines`). `lay_out` turns it into a `Drawing`, which has the place of every text, so that tests can
check whether texts overlap; `Drawing.svg` is the file. Text stays text, in the reader's font. The widths below are for DejaVu Sans, the
widest of the fonts in FONT, so what fits in it fits in the others.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

from benchmarks import palette
from benchmarks._scale import Scale, number

WIDTH = 480  # of every figure; at 400 pixels the smallest text is 9.6 pixels high
PAD, TITLE, BODY, SMALL = 12, 15, 12.5, 11.5  # margins, and sizes of text
LABELS, ROW, LINE = 172, 19, 15  # width of the column of words, height of a row, and of each further line of its words
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,'DejaVu Sans',sans-serif"
_WIDTHS = {
    0.3: "'IJijl", 0.35: " ,./:;\\|·’\u00a0", 0.4: "()-[]ft", 0.45: "!r", 0.5: '"*_`–', 0.55: "?csz", 0.6: "FLkvxy",
    0.7: "ABCKRVXZ", 0.75: "NU", 0.8: "&DGHOQ", 0.85: "#+<=>^w~×→←↑↓≥", 0.9: "M", 1.0: "%@Wm",
}  # fmt: skip
_EM = {c: width for width, characters in _WIDTHS.items() for c in characters}


def width_of(text: str, size: float, bold: bool = False) -> float:
    return sum(_EM.get(c, 0.65) for c in text) * size * (1.1 if bold else 1)


def wrap(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Lines of whole words that are at most so wide, if each word is."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


# ---- what a figure is


@dataclasses.dataclass(frozen=True)
class Point:
    """`hollow`: in float32; then the points of the figure that are filled are in bfloat16."""

    who: str
    value: float
    hollow: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """Words, and points beside them; `beyond` says of XLA what has no number, beside an arrow to the left or to the right."""

    label: str
    points: tuple[Point, ...]
    value: str = ""  # beside the last point
    beyond: str = ""
    left: bool = False


@dataclasses.dataclass(frozen=True)
class Dots:
    """A heading and rows. All panels of dots in a figure share one logarithmic axis.

    beside: the same rows on other GPUs, which `gpu` names: each has a column of its own, to the right of the words.
    """

    heading: str
    rows: tuple[Row, ...]
    gpu: str = ""
    beside: tuple[Dots, ...] = ()

    def columns(self) -> tuple[Dots, ...]:
        return (self, *self.beside)

    def points(self) -> list[Point]:
        return [p for column in self.columns() for row in column.rows for p in row.points]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Points in the order of x, for each implementation."""

    title: str
    lines: dict[str, list[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Axis:
    """What an axis shows: quantity with unit, and which direction is better ("faster"), with `towards` a larger number or a smaller."""

    quantity: str
    better: str = ""
    larger: bool = True
    log: bool = True
    base: float = 10

    def label(self, upright: bool) -> str:
        if not self.better:
            return self.quantity
        arrow = ("↑" if self.larger else "↓") if upright else ("→" if self.larger else "←")
        return f"{self.quantity}   {arrow} {self.better}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """`base`: the words at the line at 1, which has the look of `base_who`."""

    title: str
    environment: str
    panels: tuple[Dots, ...] | tuple[Lines, ...]
    x: Axis
    y: Axis | None = None
    base: str = ""
    base_who: str = "copy"
    note: str = ""

    def shown(self) -> list[str]:
        """Implementations in the order of the legend."""
        found = set()
        for panel in self.panels:
            found |= set(panel.lines) if isinstance(panel, Lines) else {p.who for p in panel.points()}
        return [who for who in palette.LOOKS if who in found]


# ---- how it is drawn


@dataclasses.dataclass(frozen=True)
class Box:
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Drawing:
    """Elements of an SVG file, and the boxes of its texts and markers."""

    def __init__(self, theme: str, title: str, description: str) -> None:
        self.theme, self.title, self.description, self.height = theme, title, description, 0.0
        self.items: list[str] = []
        self.markers: dict[str, str] = {}
        self.texts: list[Box] = []
        self.marks: list[Box] = []

    def text(self, x: float, y: float, text: str, size: float = BODY, anchor: str = "start", kind: str = "") -> None:
        """Its baseline is at y; `kind`: m for muted, b for bold."""
        width = width_of(text, size, "b" in kind)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        self.texts.append(Box(text, left, y - 0.75 * size, left + width, y + 0.2 * size))
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style = f' class="{kind}"' if kind else ""
        size_ = "" if size == BODY else f' font-size="{size:g}"'
        self.items.append(f'<text x="{_n(x)}" y="{_n(y)}"{size_}{at}{style}>{html.escape(text, False)}</text>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1, dash: str = "") -> None:
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        own = "" if width == 1 else f' stroke-width="{width:g}"'  # 1 is SVG's
        self.items.append(f'<polyline points="{path}" stroke="{colour}"{own}{dashes}/>')

    def mark(self, x: float, y: float, who: str, hollow: bool = False, size: float = 4.2) -> None:
        """A marker with its centre at (x, y). Each kind is defined once, and used by reference."""
        look, r = palette.LOOKS.get(who, palette.DTYPE), size
        colour, behind = look.colour(self.theme), palette.BEHIND[self.theme][0]
        fill = behind if hollow or look.hollow else colour
        shape = {
            "circle": f"M{-r:g} 0a{r:g} {r:g} 0 1 0 {2 * r:g} 0a{r:g} {r:g} 0 1 0 {-2 * r:g} 0z",
            "square": f"M{_n(-0.85 * r)} {_n(-0.85 * r)}h{_n(1.7 * r)}v{_n(1.7 * r)}h{_n(-1.7 * r)}z",
            "triangle": f"M0 {_n(-1.1 * r)}l{_n(1.05 * r)} {_n(1.9 * r)}h{_n(-2.1 * r)}z",
            "down": f"M0 {_n(1.1 * r)}l{_n(1.05 * r)} {_n(-1.9 * r)}h{_n(-2.1 * r)}z",
            "diamond": f"M0 {_n(-1.25 * r)}L{_n(1.25 * r)} 0L0 {_n(1.25 * r)}L{_n(-1.25 * r)} 0z",
        }[look.marker]
        marker = f'd="{shape}" fill="{fill}" stroke="{colour}" stroke-width="1.6"'
        name = self.markers.setdefault(marker, f"m{len(self.markers)}")
        self.marks.append(Box(who, x - r, y - r, x + r, y + r))
        self.items.append(f'<use href="#{name}" x="{_n(x)}" y="{_n(y)}"/>')

    def svg(self) -> str:
        height = _n(self.height)
        markers = "".join(f'<path id="{name}" {marker}/>' for marker, name in self.markers.items())
        style = (
            f"text{{font:{BODY}px {FONT};fill:{palette.INK[self.theme]}}}"
            f".m,.bm{{fill:{palette.MUTED[self.theme]}}}.b,.bm{{font-weight:600}}polyline{{fill:none;stroke-linejoin:round}}"
        )
        sized = [f'font-size="{size:g}"' for size in (TITLE, SMALL)]
        style += "".join(f"[{attribute}]{{font-size:{attribute[11:-1]}px}}" for attribute in sized)
        behind = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>' if self.theme == "light" else ""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        return "\n".join(
            [
                head,
                f"<title>{html.escape(self.title, False)}</title>",
                f"<desc>{html.escape(self.description, False)}</desc>",
                f"<style>{style}</style>",
                f"<defs>{markers}</defs>",
                *([behind] if behind else []),
                *self.items,
                "</svg>\n",
            ]
        )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def lay_out(figure: Figure, theme: str) -> Drawing:
    words = (
        f"{figure.x.label(False)}. {figure.y.label(True) + '. ' if figure.y else ''}{figure.environment}. {figure.note}"
    )
    drawing = Drawing(theme, figure.title, words.strip())
    y = _head(drawing, figure)
    y = _dots(drawing, figure, y) if isinstance(figure.panels[0], Dots) else _lines(drawing, figure, y)
    for line in wrap(figure.note, WIDTH - 2 * PAD, SMALL) if figure.note else ():
        y += LINE
        drawing.text(PAD, y, line, SMALL, kind="m")
    drawing.height = math.ceil(y + PAD)
    return drawing


def _head(drawing: Drawing, figure: Figure) -> float:
    """Title, machine and legend; returns where they end."""
    y = float(PAD)
    for line in wrap(figure.title, WIDTH - 2 * PAD, TITLE, True):
        y += 19
        drawing.text(PAD, y - 4, line, TITLE, kind="b")
    for machine in figure.environment.split("\n"):
        for line in wrap(machine, WIDTH - 2 * PAD, SMALL):
            y += LINE
            drawing.text(PAD, y - 2, line, SMALL, kind="m")
    entries = [(who, False, palette.LOOKS[who].name) for who in figure.shown()]
    if any(p.hollow for panel in figure.panels if isinstance(panel, Dots) for p in panel.points()):
        entries += [("filled", False, "bfloat16"), ("filled", True, "float32")]
    x, y = float(PAD), y + 20
    for who, hollow, words in entries:
        look = palette.LOOKS.get(who, palette.DTYPE)
        needed = 22 + width_of(words, BODY) + 14
        if x > PAD and x + needed - 14 > WIDTH - PAD:
            x, y = float(PAD), y + 18
        if isinstance(figure.panels[0], Lines):
            drawing.line([(x, y - 4), (x + 18, y - 4)], look.colour(drawing.theme), 1.6, look.dash)
        if look.marker:
            drawing.mark(x + 9, y - 4, who, hollow)
        drawing.text(x + 22, y, words)
        x += needed
    return y + 8


def _dots(drawing: Drawing, figure: Figure, y: float) -> float:
    rows = [row for panel in figure.panels for column in panel.columns() for row in column.rows]
    columns = max(len(panel.columns()) for panel in figure.panels)
    scales = _scales(figure, rows, columns)
    grid, muted = palette.GRID[drawing.theme], palette.MUTED[drawing.theme]
    if figure.base:
        y += LINE
        at, half = scales[-1](1), width_of(figure.base, SMALL) / 2
        drawing.text(min(max(at, PAD + half), WIDTH - PAD - half), y, figure.base, SMALL, "middle", "m")
        y += 5
    ticks = scales[0].ticks(6) if columns == 1 else _fitting(scales[0], 4)
    for panel in figure.panels:
        if panel.heading or columns > 1:
            for line in wrap(panel.heading, WIDTH - 2 * PAD if columns == 1 else LABELS, BODY, True):
                y += 19
                drawing.text(PAD, y - 3, line, kind="b")
            for scale, column in zip(scales, panel.columns()):
                if column.gpu:
                    drawing.text(scale.start, y - 3, column.gpu, SMALL, kind="m")
            y += 4
        rows_end = y + sum(_height(row) for row in panel.rows)
        for scale in scales:
            for tick in ticks:
                drawing.line([(scale(tick), y), (scale(tick), rows_end)], grid)
            if figure.base:
                colour = palette.LOOKS[figure.base_who].colour(drawing.theme)
                drawing.line([(scale(1), y), (scale(1), rows_end)], colour, 1.4, "5 4")
        for of in zip(*(column.rows for column in panel.columns())):
            for k, line in enumerate(wrap(of[0].label, LABELS, BODY)):
                drawing.text(PAD + LABELS, y + 14 + LINE * k, line, anchor="end")
            for row, scale in zip(of, scales):
                _row(drawing, row, scale, y)
            y += _height(of[0])
    for scale in scales:
        drawing.line([(scale.start, y), (scale.end, y)], muted)
        for tick in ticks:
            drawing.text(scale(tick), y + 14, number(tick), SMALL, "middle", "m")
    y += 16
    for line in wrap(figure.x.label(False) + " (log scale)" * figure.x.log, WIDTH - 2 * PAD, BODY):
        y += LINE + 1
        drawing.text(WIDTH - PAD, y, line, anchor="end")
    return y + 4


def _scales(figure: Figure, rows: list[Row], columns: int) -> list[Scale]:
    """The axis of each column of dots."""
    values = [p.value for row in rows for p in row.points] + [1.0] * bool(figure.base)
    beyond = any(row.beyond and not row.left for row in rows)
    low, high = min(values), max(values)
    margin = 1.05 * (high / low) ** 0.04
    if not figure.x.log:
        low, high, margin = 0.0, high * 1.1, 1.0
    start, end, gap = PAD + LABELS + 8, WIDTH - PAD - (30 if beyond else 8), 16
    scale = Scale(low / margin, high * margin, start, end, figure.x.log)
    if columns == 1:
        return [dataclasses.replace(scale, end=min((_end(row, scale) for row in rows if row.value), default=end))]
    width = (end - start - gap * (columns - 1)) / columns
    starts = [start + k * (width + gap) for k in range(columns)]
    return [dataclasses.replace(scale, start=s, end=s + width) for s in starts]


def _height(row: Row) -> float:
    return ROW + LINE * (len(wrap(row.label, LABELS, BODY)) - 1)


def _end(row: Row, scale: Scale) -> float:
    """Where the scale may end at most, so that the words beside the last point are inside the figure."""
    last = max(scale(p.value) for p in row.points)
    room = WIDTH - 5 - 9 - width_of(row.value, SMALL) - scale.start
    return min(scale.end, scale.start + room * (scale.end - scale.start) / max(last - scale.start, 1))


def _row(drawing: Drawing, row: Row, scale: Scale, y: float) -> None:
    middle = y + _height(row) / 2
    drawing.line([(scale.start, middle), (scale.end, middle)], palette.GRID[drawing.theme], 0.8)
    for point in sorted(row.points, key=lambda p: list(palette.LOOKS).index(p.who), reverse=True):
        drawing.mark(scale(point.value), middle, point.who, point.hollow)
    if row.value:
        drawing.text(max(scale(p.value) for p in row.points) + 9, middle + 4, row.value, SMALL, kind="m")
    if row.beyond:
        tip, to = (scale.start, -1) if row.left else (WIDTH - PAD - 1, 1)
        colour, back = palette.LOOKS["xla"].colour(drawing.theme), tip - 15 * to
        drawing.line([(back, middle), (tip, middle)], colour, 1.8)
        drawing.line([(tip - 6 * to, middle - 4.5), (tip, middle), (tip - 6 * to, middle + 4.5)], colour, 1.8)
        if row.left:
            drawing.text(back + 5, middle + 4, row.beyond, SMALL)
        else:
            drawing.text(_free(row, scale, back - 5), middle + 4, row.beyond, SMALL, "end")


def _free(row: Row, scale: Scale, end: float) -> float:
    """The right end of the words about what has no number: the last place between points that has room for them."""
    places = [end + 9, *sorted((scale(p.value) for p in row.points), reverse=True)]
    room = width_of(row.beyond, SMALL) + 18
    return next((right - 9 for right, left in zip(places, [*places[1:], scale.start - 9]) if right - left >= room), end)


def _lines(drawing: Drawing, figure: Figure, y: float) -> float:
    panels, columns = list(figure.panels), 1 if len(figure.panels) == 1 else 2
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    xs, values = [x for x, _ in points], [v for _, v in points]
    low, high = (min(values) / 1.3, max(values) * 1.3) if figure.y.log else (0.0, max(values) * 1.06)
    height = 190.0 if columns == 1 else 132.0
    rise = Scale(low, high, height, 0, figure.y.log)
    left = 8 + max(width_of(number(tick), SMALL) for tick in rise.ticks(5))
    width = (WIDTH - 2 * PAD - 6 - columns * (left + 8)) / columns
    grid, muted = palette.GRID[drawing.theme], palette.MUTED[drawing.theme]
    y = _sentence(drawing, figure.y.label(True) + " (log scale)" * figure.y.log, y)
    for k in range(0, len(panels), columns):
        row = panels[k : k + columns]
        titles = [wrap(panel.title, width + 6, BODY, True) for panel in row]
        top = y + 7 + LINE * max(map(len, titles))
        for j, (panel, title) in enumerate(zip(row, titles)):
            x0 = PAD + left + j * (width + left + 14)
            across = Scale(min(xs), max(xs), x0 + 5, x0 + width - 5, figure.x.log, figure.x.base)
            up = dataclasses.replace(rise, start=top + height, end=top)
            for n, line in enumerate(reversed(title)):
                drawing.text(x0, top - 7 - LINE * n, line, kind="b")
            for tick in up.ticks(5):
                drawing.line([(x0, up(tick)), (x0 + width, up(tick))], grid)
                drawing.text(x0 - 5, up(tick) + 4, number(tick), SMALL, "end", "m")
            drawing.line([(x0, top + height), (x0 + width, top + height)], muted)
            for tick in _fitting(across):
                drawing.line([(across(tick), top + height), (across(tick), top + height + 4)], muted)
                drawing.text(across(tick), top + height + 16, number(tick), SMALL, "middle", "m")
            for who in reversed(figure.shown()):
                if who in panel.lines:
                    _series(drawing, who, [(across(x), up(v)) for x, v in panel.lines[who]])
        y = top + height + 20
    return _sentence(drawing, figure.x.label(False) + " (log scale)" * figure.x.log, y) + 2


def _sentence(drawing: Drawing, text: str, y: float) -> float:
    for line in wrap(text, WIDTH - 2 * PAD, BODY):
        y += LINE + 1
        drawing.text(PAD, y, line)
    return y


def _fitting(scale: Scale, most: int = 5) -> list[float]:
    """Ticks, at most so many, whose numbers do not run into each other, nor over the end of the axis."""
    for most in range(most, 1, -1):
        ends = [(scale(t) - w / 2, scale(t) + w / 2) for t in scale.ticks(most) if (w := width_of(number(t), SMALL))]
        if all(a[1] + 6 <= b[0] for a, b in zip(ends, ends[1:])):
            break
    return [t for t in scale.ticks(most) if scale(t) + width_of(number(t), SMALL) / 2 <= scale.end + 10]


def _series(drawing: Drawing, who: str, points: list[tuple[float, float]]) -> None:
    look = palette.LOOKS[who]
    elsewhere = who in palette.ELSEWHERE
    drawing.line(points, look.colour(drawing.theme), 2 if who == "jaxkern" else 0.9 if elsewhere else 1.4, look.dash)
    for x, y in points if look.marker else ():
        drawing.mark(x, y, who, size=2 if elsewhere else 3)


def overlapping(drawing: Drawing) -> list[tuple[str, str]]:
    """Texts that overlap each other or a marker, or leave the figure."""
    found = []
    inside = lambda b: b.left >= 0 and b.right <= WIDTH and b.top >= 0 and b.bottom <= drawing.height
    for k, box in enumerate(drawing.texts):
        others = (*drawing.texts[k + 1 :], *drawing.marks)
        found += [(box.text, other.text) for other in others if box.overlaps(other)]
        found += [] if inside(box) else [(box.text, "the edge")]
    return found
