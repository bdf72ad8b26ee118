"""A function to compile and time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax

import jaxkern


@dataclasses.dataclass
class Program:
    """A function to compile: `specs` are its arguments, told apart by what they hold.

    forced: the algorithms that operations use which choose one where they are lowered.
    """

    name: str
    function: Callable[..., Any]
    specs: list[jax.ShapeDtypeStruct]
    donate: tuple[int, ...] = ()
    forced: dict[str, str] = dataclasses.field(default_factory=dict)
    compiled: Any = None
    error: str = ""

    def compile(self) -> None:
        try:
            with jaxkern.algorithms.force(**self.forced):
                self.compiled = jax.jit(self.function, donate_argnums=self.donate).lower(*self.specs).compile()
        except Exception as e:
            self.error = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"

    def __call__(self, *arguments: Any) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        return self.compiled(*arguments)

    @property
    def targets(self) -> list[str]:
        """Handlers of this library that the compiled program calls."""
        return re.findall(r'custom_call_target="(jaxkern\w*)"', self.compiled.as_text()) if self.compiled else []
