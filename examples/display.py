"""Shared by the examples: progress, the picture of two trainings, and the last lines, which say what to look at."""

import pathlib
import sys

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

JAXKERN, XLA = "#c8500a", "#0072b2"  # in every picture: jaxkern, and the same in plain JAX
DIFFERENCE = "#59636e"


class Progress:
    """Iterates over `items`: with a bar on a terminal, elsewhere with a line at the start and after each fifth of them.

    `note` sets the numbers that are shown beside the progress. compiles: whether the first item compiles programs.
    """

    def __init__(self, items, name, unit="step", compiles=True):
        self.items, self.name, self.unit, self.compiles, self.numbers = list(items), name, unit, compiles, {}
        self.bar = tqdm(self.items, desc=name, unit=unit, mininterval=0.5) if sys.stderr.isatty() else None

    def note(self, **numbers):
        self.numbers = numbers
        if self.bar is not None:
            self.bar.set_postfix(numbers, refresh=False)

    def __iter__(self):
        total = len(self.items)
        if self.bar is None and self.compiles:
            print(
                f"{self.name}: the first {self.unit} of {total} compiles, up to a minute", file=sys.stderr, flush=True
            )
        for done, item in enumerate(self.items if self.bar is None else self.bar, 1):
            yield item
            if self.bar is None and 5 * done // total > 5 * (done - 1) // total:
                numbers = "".join(f"  {name}={value}" for name, value in self.numbers.items())
                print(f"{self.name}: {self.unit} {done}/{total}{numbers}", file=sys.stderr, flush=True)


def add_out(parser, program):
    """Adds --out; by default the picture lies beside the example."""
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(program).with_suffix(".png"), help="file of the picture (.png)"
    )


def check_out(parser, out):
    """Ends the program if the picture could not be written: said now, not after the training."""
    if not out.parent.is_dir():
        parser.error(f"--out: there is no folder {out.parent}")


def style(axes, x, y):
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(axes, below, curves, unit, legends=None):
    """Two curves of losses in one panel, and the first one minus the second in the panel below."""
    looks = [{"color": JAXKERN, "lw": 4, "alpha": 0.45}, {"color": XLA, "lw": 1.0}]
    for (name, curve), look in zip(curves.items(), looks):
        axes.plot(np.arange(1, len(curve) + 1), curve, label=(legends or {}).get(name, name), **look)
    axes.legend(frameon=False)
    style(axes, "", f"training loss, {unit}\n(lower is better)")
    below.axhline(0, color=DIFFERENCE, lw=0.8)
    difference = np.subtract(*curves.values())
    below.plot(np.arange(1, len(difference) + 1), difference, color=DIFFERENCE, lw=0.9)
    if difference.any():
        below.ticklabel_format(axis="y", scilimits=(-2, 2))
    else:
        below.set_yticks([0])
    style(below, "training step", f"difference,\n{unit}")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))


def save_curves(out, curves, unit, title, setting, legends=None):
    """The picture of one model trained in two ways, which lie on each other if both compute the same."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    draw_curves(axes, below, curves, unit, legends)
    save(figure, out, title, setting)


def save(figure, out, title, setting):
    figure.suptitle(f"{title}\n", fontsize=12, x=0.01, ha="left")
    figure.text(0.01, 0.945, setting, fontsize=9, color=DIFFERENCE, va="top")
    figure.savefig(out, dpi=150)


def conclude(what, agree, out, picture, numbers):
    """Prints what to look at and, last, whether both ways agree; returns the exit status."""
    print(f"\npicture  {out}\n         {picture}")
    for name, meaning in numbers.items():
        print(f"compare  {name}: {meaning}")
    if jax.default_backend() != "gpu":
        print("times    no GPU here: XLA runs both ways on this machine, and kernels run on neither side")
    print(f"the {what} agree" if agree else f"THE {what.upper()} DISAGREE")
    return int(not agree)
