"""The drawings of docs/drawings, for light and for dark pages: `python docs/draw.py` writes them again.

They are laid out for phones by the module that lays out figures. Blue marks Python, green what runs on a GPU, amber what a user gives,
and grey what is left out. Rows of an array have a colour each, without another meaning.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import _svg, palette  # noqa: E402

FOLDER = ROOT / "docs" / "drawings"
# Kind of a box: fill and edge on a light page, and on a dark one.
KINDS = {
    "user": ("#fff4e0", "#d98200", "#3d2e12", "#ffb74d"),
    "python": ("#eef2ff", "#4051b5", "#1f2a4d", "#8c9eff"),
    "gpu": ("#e6f6ea", "#2e8b4f", "#15331f", "#5fd38d"),
    "off": ("#f3f3f3", "#999999", "#2a2f36", "#7d8792"),
    "row 0": ("#dbe4ff", "#777777", "#2a3866", "#9aa4ae"),
    "row 1": ("#ffe3c2", "#777777", "#54401c", "#9aa4ae"),
    "row 2": ("#d3f0dc", "#777777", "#1d452a", "#9aa4ae"),
    "row 3": ("#f3d6ee", "#777777", "#4a2a45", "#9aa4ae"),
}
LINE, HEAD, SMALL = 15, 12.5, _svg.SMALL


class Drawing(_svg.Drawing):
    """Boxes with centred words, and arrows."""

    def box(self, left, top, width, kind, head="", words="", height=0.0):
        """Returns where the box ends, below. Words are wrapped; the box is as high as they need, if not told."""
        light = 2 * (self.theme == "dark")
        fill, edge = KINDS[kind][light : light + 2]
        lines = [(line, HEAD, "") for line in _svg.wrap(head, width - 8, HEAD)] if head else []
        lines += (
            [(line, SMALL, "m") for line in _svg.wrap(words, width - 8, SMALL)] if words else []
        )
        needed = LINE * len(lines) + 11
        height = max(height, needed)
        at = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
        self.items.append(f'<rect {at} rx="5" fill="{fill}" stroke="{edge}"/>')
        for k, (line, size, style) in enumerate(lines):
            y = top + (height - needed) / 2 + 17 + LINE * k
            self.text(left + width / 2, y, line, size, "middle", style)
        self.height = max(self.height, top + height + _svg.PAD)
        return top + height

    def arrow(self, *points):
        """Through the points; the last piece has a head."""
        ink = palette.INK[self.theme]
        self.line(points, ink, 1.3)
        (ax, ay), (bx, by) = points[-2:]
        long = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5
        dx, dy = 7 * (bx - ax) / long, 7 * (by - ay) / long
        wings = [
            (bx - dx - dy / 2, by - dy + dx / 2),
            (bx, by),
            (bx - dx + dy / 2, by - dy - dx / 2),
        ]
        self.line(wings, ink, 1.3)

    def caption(self, y, words, kind="m", left=_svg.PAD):
        """Returns where the words end, below."""
        for line in _svg.wrap(words, _svg.WIDTH - left - _svg.PAD, SMALL):
            self.text(left, y, line, SMALL, kind=kind)
            y += LINE
        self.height = max(self.height, y)
        return y


def path(theme):
    d = Drawing(
        theme,
        "From a call to kernels",
        "What becomes of a call of jaxkern.softmax, from Python to the GPU.",
    )
    left, right, width = 12, 258, 210
    d.caption(24, "while tracing: Python", "b")
    d.box(left, 36, width, "user", "jaxkern.softmax(x)", "or plain JAX under install()", 58)
    d.box(
        right, 36, width, "python", "primitive softmax_p", "shapes, batching, derivatives", 58
    )
    d.arrow((left + width, 65), (right, 65))
    d.caption(122, "while lowering: Python", "b")
    d.box(
        left,
        134,
        width,
        "off",
        "reference in jnp, for XLA",
        "no GPU, no kernel, or force_xla",
        72,
    )
    d.box(
        right,
        134,
        width,
        "python",
        "plan(device, operands, results)",
        "which kernels, grids, scratch: pure Python",
        72,
    )
    d.arrow((right + 105, 94), (right + 105, 134))
    d.arrow((right, 170), (left + width, 170))
    last = d.box(
        right,
        226,
        width,
        "python",
        "launch list",
        "text in one custom call: templates, arguments, grids, buffers",
    )
    d.arrow((right + 105, 206), (right + 105, 226))
    d.caption(318, "in the compiled program: C++ and CUDA", "b")
    end = d.box(
        right,
        330,
        width,
        "gpu",
        "runtime",
        "XLA initialises: NVRTC compiles. XLA executes: kernels are launched.",
    )
    d.arrow((right + 105, last), (right + 105, 330))
    d.box(left, 330, width, "gpu", "cache of kernels", "in memory and on disk", end - 330)
    d.arrow((right, 358), (left + width, 358))
    d.box(
        left,
        end + 22,
        width,
        "gpu",
        "ffi/kernels/**/*.cuh",
        "templates, shipped in the package",
    )
    d.arrow((left + 105, end + 22), (left + 105, end))
    return d


def rows(theme):
    d = Drawing(
        theme,
        "How rows of growing width map to the GPU",
        "Which threads hold a row of softmax, by its size.",
    )
    start, width = 128, 340
    kinds = [
        ("lanes", "up to 1 KB", "python", ["lanes"] * 7),
        ("warp", "up to 2 KB", "python", ["a warp"] * 4),
        ("block", "up to 40 KB", "gpu", ["a block holds a row in registers"] * 2),
        (
            "cluster",
            "up to 2 MB",
            "gpu",
            ["2 to 16 blocks hold one row, and exchange two numbers"],
        ),
    ]
    y = 14.0
    for name, size, kind, words in kinds:
        each = (width - 4 * (len(words) - 1)) / len(words)
        end = max(
            d.box(start + k * (each + 4), y, each, kind, "", w, 36) for k, w in enumerate(words)
        )
        d.text(_svg.PAD, y + 15, name, HEAD, kind="b")
        d.text(_svg.PAD, y + 31, size, SMALL, kind="m")
        y = end + 12
    d.text(_svg.PAD, y + 12, "streaming", HEAD, kind="b")
    d.text(_svg.PAD, y + 28, "any size", SMALL, kind="m")
    d.arrow((start, y + 8), (start + width, y + 8))
    d.arrow((start, y + 20), (start + width, y + 20))
    d.caption(y + 40, "a block reads the row twice: statistics, then results", left=start)
    return d


def segments(theme):
    d = Drawing(
        theme,
        "Sums at indices in a fixed order",
        "Updates are sorted by row, and chunks of them are summed.",
    )
    updates = [2, 0, 2, 1, 2, 0, 2, 3]  # the row of each
    order = sorted(range(8), key=lambda k: (updates[k], k))
    left, width, step = 12, 53, 57.5
    middle = lambda k: left + k * step + width / 2
    d.caption(22, "updates, in any order", "b")
    for k, row in enumerate(updates):
        place = order.index(k)
        d.line([(middle(k), 60), (middle(place), 106)], palette.MUTED[theme], 0.8)
        d.box(left + k * step, 32, width, f"row {row}", "", f"row {row}", 28)
        d.box(left + place * step, 106, width, f"row {row}", "", f"{row}, {k}", 28)
    d.caption(150, "sorted by row, then by position", "b")
    chunks = [(0, 3), (3, 6), (6, 8)]
    centres = [(middle(a) + middle(b - 1)) / 2 for a, b in chunks]
    for n, ((a, b), x) in enumerate(zip(chunks, centres), 1):
        end = d.box(
            left + a * step,
            184,
            (b - a) * step - 4.5,
            "python",
            f"chunk {n}",
            f"positions {a} to {b - 1}",
        )
        d.arrow((x, 156), (x, 184))
    d.caption(end + 17, "chunks, reduced in registers", "b")
    for row, (column, sources) in {
        0: (0, [0]),
        1: (2, [0]),
        2: (4, [1, 2]),
        3: (7, [2]),
    }.items():
        d.box(left + column * step, end + 62, width, f"row {row}", "", f"row {row}", 28)
        for source in sources:
            d.arrow((centres[source], end + 23), (middle(column), end + 62))
    d.caption(
        end + 112,
        "Row 2 is cut by the edge of a chunk: its two partial sums are joined in the order of the chunks.",
    )
    return d


def messages(theme):
    d = Drawing(
        theme,
        "Gather, function and sum in one kernel",
        "Plain JAX makes three passes over edges, a kernel one.",
    )
    left, right, width = 12, 250, 218
    d.text(left + width / 2, 24, "plain JAX: three passes", HEAD, "middle", "b")
    d.text(right + width / 2, 24, "one message kernel", HEAD, "middle", "b")
    d.line([(240, 12), (240, 282)], palette.MUTED[theme], 0.8, "4 3")
    passes = [
        ("x[senders]", "writes edges × features"),
        ("f(x, w)", "reads and writes edges × features"),
        ("segment_sum", "reads edges × features, adds atomically"),
    ]
    y = 38
    for k, (head, words) in enumerate(passes):
        end = d.box(left, y, width, "off", head, words, 66)
        if k < 2:
            d.arrow((left + width / 2, end), (left + width / 2, end + 20))
        y = end + 20
    half = (width - 8) / 2
    d.box(right, 38, half, "user", "senders: x", "nodes × features", 58)
    d.box(right + half + 8, 38, half, "user", "edges: w", "edges × 1", 58)
    end = d.box(
        right,
        124,
        width,
        "gpu",
        "gather, f, add",
        "in registers, a chunk of edges at a time, in the order of receivers",
    )
    d.arrow((right + half / 2, 96), (right + half / 2 + 20, 124))
    d.arrow((right + width - half / 2, 96), (right + width - half / 2 - 20, 124))
    d.box(right, end + 24, width, "user", "y: nodes × features", "", 40)
    d.arrow((right + width / 2, end), (right + width / 2, end + 24))
    return d


DRAWINGS = (path, rows, segments, messages)


def files():
    """{name of a file: its content}."""
    return {
        f"{draw.__name__}-{theme}.svg": draw(theme).svg()
        for draw in DRAWINGS
        for theme in palette.THEMES
    }


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).write_text(content)
