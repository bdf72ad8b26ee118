"""Colours and markers of all figures: one meaning per colour, for light and for dark pages, also for the colour-blind.

The hues of jaxkern, XLA and PyTorch follow Okabe and Ito ("Color Universal Design", 2008), darker for light pages and lighter for
dark ones. tests/test_figures.py checks contrasts, and how different the colours are for the colour-blind.
"""

from __future__ import annotations

import dataclasses

THEMES = ("light", "dark")
# What lies behind a figure: the page itself if it is dark, so that a figure fits any dark page.
BEHIND = {"light": ("#ffffff",), "dark": ("#0d1117", "#1e2129")}
INK = {"light": "#1f2328", "dark": "#e6edf3"}
MUTED = {"light": "#59636e", "dark": "#a3adb8"}
GRID = {"light": "#dfe3e8", "dark": "#343b45"}


@dataclasses.dataclass(frozen=True)
class Look:
    """How an implementation is drawn. `name` is what legends say; a hollow marker is the same colour with another meaning."""

    name: str
    light: str
    dark: str
    marker: str = "circle"  # circle, square, triangle, diamond, down
    dash: str = ""  # of lines
    hollow: bool = False

    def colour(self, theme: str) -> str:
        return self.light if theme == "light" else self.dark


_OURS, _XLA, _TORCH, _PEER = (
    ("#c8500a", "#ff8a4c"),
    ("#0072b2", "#5ab4f0"),
    ("#00805c", "#35d0a0"),
    ("#7a3b6a", "#c050f5"),
)
LOOKS = {
    "jaxkern": Look("jaxkern", *_OURS),
    "by operation": Look("jaxkern, an operation at a time", *_OURS, marker="circle", dash="2 3", hollow=True),
    "xla": Look("XLA", *_XLA, marker="square"),
    "associative_scan": Look("XLA, lax.associative_scan", *_XLA, marker="square", dash="2 3", hollow=True),
    "torch": Look("PyTorch", *_TORCH, marker="triangle"),
    "pyg": Look("PyTorch Geometric", *_TORCH, marker="diamond"),
    "oneflow": Look("OneFlow", *_PEER, marker="down", dash="1 2"),
    "cudnn": Look("cuDNN", *_PEER, marker="diamond", dash="5 3"),
    "quack": Look("QuACK", *_PEER, marker="triangle", dash="8 3"),
    "liger": Look("Liger", *_PEER, marker="square", dash="8 3 2 3"),
    "copy": Look("a copy", INK["light"], INK["dark"], marker="", dash="5 4"),
}
DTYPE = Look("dtype", MUTED["light"], MUTED["dark"])  # in legends, where filled and hollow markers differ in the dtype
ELSEWHERE = ("oneflow", "cudnn", "quack", "liger")  # peers of benchmarks/peers.json, measured in another run
