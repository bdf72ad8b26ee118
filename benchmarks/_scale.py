"""Axes of figures: positions of numbers, round numbers for their ticks, and numbers as text."""

from __future__ import annotations

import dataclasses
import math


def number(value: float) -> str:
    """1 000 with a space that does not break; small ones as they are."""
    if value >= 10 or value == int(value):
        return f"{value:,.0f}".replace(",", "\u00a0")
    return f"{value:.6f}".rstrip("0")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high` to positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True
    base: float = 10

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        of = math.log if self.log else float
        return self.start + (self.end - self.start) * (of(value) - of(self.low)) / (of(self.high) - of(self.low))

    def ticks(self, most: int) -> list[float]:
        """Round numbers in the range, at most so many where that leaves two."""
        if not self.log:
            step = 10 ** math.floor(math.log10(self.high / most))
            step *= next(k for k in (1, 2, 5, 10) if k * step * most >= self.high)
            return [k * step for k in range(int(self.high / step) + 1)]
        if self.base == 2:
            powers = range(math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9) + 1)
            every = max(1, math.ceil(len(powers) / most))
            return [2.0**k for k in powers[::every]]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps, every in (((1, 1.5, 2, 3, 5, 7), 1), ((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            found = [s * 10.0**k for k in decades if k % every == 0 for s in steps]
            found = [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
            if len(found) <= most:
                break
        return [float(f"{v:.3g}") for v in found]
