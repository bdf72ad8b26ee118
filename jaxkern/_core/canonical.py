"""A text for each jaxpr of scalars. Jaxprs with equal texts compute the same and have the same derivatives, to any order.

The text numbers variables in the order of their equations, writes numbers bit by bit, and is the same in every process. It
holds `stop_gradient`, which changes derivatives alone, and each rule of a `custom_jvp` or `custom_vjp`:

    rule0(x0)                       in an equation
    rule0 = <body> <rule>           below, where the rule may call further rules, or rule0 itself

Two equations have one rule if they run the same computation and their rules are the same Python functions with the same
static arguments, so rules that call themselves or each other end. JAX's own rules are written by name. The text of what has
no stable text is unique: a function that contains it equals no other.
"""

import contextlib
import enum
import functools
import hashlib
import types
import uuid

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxkern._core.jaxprs import CALLS, CUSTOM, CUSTOM_JVP, called_jaxpr, jvp_rule, vjp_rule

MOST_RULES = 64  # in a function. JAX has rules that call new ones without end.
_PLACEMENT = ("sharding", "out_sharding", "dst_sharding")  # parameters that change no value
_PLUMBING = ("DebugInfo", "EqualStore", "Store", "TraceTag", "DynamicJaxprTrace", "JaxprTrace")  # JAX's objects


def text_of(closed) -> str:
    """The text of a ClosedJaxpr."""
    writer = _Writer()
    lines = [writer.body(closed.jaxpr, closed.consts)]
    while writer.pending:
        lines.append(writer.definition(*writer.pending.pop(0)))
    return "\n".join(lines)


def rule_identity(e) -> tuple:
    """What identifies the rule of an equation with a `custom_jvp` or `custom_vjp`, while the equation is alive."""
    return _Identity(e).facts()


def _unique() -> str:
    return f"unique {uuid.uuid4().hex}"


def _digest(text) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Writer:
    """Texts of jaxprs that share a numbering of rules.

    rules: {(body, identity of the rule): its number}. pending: rules that have a number and no definition yet. equations:
    those with rules, which keep alive what identities name.
    """

    def __init__(self):
        self.rules, self.pending, self.equations = {}, [], []

    def body(self, jaxpr, consts) -> str:
        lines, names = [], [f"x{k}" for k in range(len(jaxpr.invars))]
        results = self._run(jaxpr, consts, names, lines)
        dtypes = ",".join(v.aval.dtype.name for v in jaxpr.invars)
        return "\n".join((f"({dtypes}) {{", *lines, f"}} -> {','.join(results)}"))

    def _run(self, jaxpr, consts, args, lines) -> list:
        """Adds the lines of a jaxpr; returns the names of its results. Calls become part of the caller."""
        env = dict(zip(jaxpr.invars, args))
        env.update((v, _value(c, v.aval.dtype)) for v, c in zip(jaxpr.constvars, consts))
        read = lambda v: _value(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]
        for e in jaxpr.eqns:
            operands = list(map(read, e.invars))
            if e.primitive.name in CALLS:
                env.update(zip(e.outvars, self._run(*called_jaxpr(e), operands, lines)))
                continue
            name = self._rule(e) if e.primitive.name in CUSTOM else f"{e.primitive.name}{self._param(_params(e))}"
            line, dtypes = len(lines), ",".join(v.aval.dtype.name for v in e.outvars)
            lines.append(f"{name}({','.join(operands)}) {dtypes}")
            env.update((v, f"v{line}.{k}") for k, v in enumerate(e.outvars))
        return list(map(read, jaxpr.outvars))

    def _param(self, p) -> str:
        if isinstance(p, ClosedJaxpr):
            return self.body(p.jaxpr, p.consts)
        if isinstance(p, (tuple, list)):
            return f"({' '.join(map(self._param, p))})"
        if isinstance(p, dict):
            return f"[{' '.join(f'{k}={self._param(p[k])}' for k in sorted(p))}]"
        if hasattr(p, "canonical_digest"):
            return p.canonical_digest
        return _simple(p) or _unique()

    # ---- rules

    def _rule(self, e) -> str:
        body = self.body(*called_jaxpr(e))
        self.equations.append(e)
        identity = _Identity(e)
        key = (e.primitive.name, body, identity.facts())
        if key not in self.rules:
            self.rules[key] = len(self.rules)
            self.pending.append((e, key, identity.stable))
        return f"rule{self.rules[key]}"

    def definition(self, e, key, stable) -> str:
        name, body, identity = key
        number = self.rules[key]
        if stable:
            rule = _digest(repr(identity))
        elif number >= MOST_RULES:
            rule = _unique()
        else:
            try:
                closed = jvp_rule(e) if name in CUSTOM_JVP else vjp_rule(e)
                rule = self.body(closed.jaxpr, closed.consts)
            except Exception:  # the rule raises, whatever it raises
                rule = _unique()
        return f"rule{number} = {name} {_digest(body)} {rule}"


def _params(e) -> dict:
    return {k: p for k, p in e.params.items() if k not in _PLACEMENT and k != "weak_type"}


def _rule_params(e) -> dict:
    """The parameters of a `custom_jvp` or `custom_vjp` that determine its rule."""
    return {k: p for k, p in e.params.items() if k not in ("jaxpr", "call_jaxpr", "fun_jaxpr", "out_trees")}


def _value(x, dtype) -> str:
    if isinstance(x, jax.core.Tracer):
        return _unique()
    return f"{np.dtype(dtype).name}:{np.asarray(x).astype(dtype).tobytes().hex()}"


def _simple(p) -> str | None:
    """The text of a constant of Python or NumPy; None for other objects."""
    if isinstance(p, enum.Enum):
        return f"{_simple(type(p))}.{p.name}" if _simple(type(p)) else None
    if p is None or isinstance(p, (bool, int, str, bytes)):
        return repr(p)
    if isinstance(p, float):
        return p.hex()
    if isinstance(p, np.dtype):
        return p.name
    if isinstance(p, type):  # users may give two classes one name
        known = _is_ours_or_jax(p.__module__) or p.__module__.split(".")[0] in ("builtins", "numpy", "ml_dtypes")
        return f"{p.__module__}.{p.__qualname__}" if known else None
    if isinstance(p, (np.generic, np.ndarray)) and p.dtype != object:
        return f"{p.dtype.name}{list(p.shape)}:{p.tobytes().hex()}"
    return None


class _Identity:
    """Which Python functions and static arguments make the rule of an equation.

    JAX wraps the user's functions in its own, once more whenever a jaxpr is evaluated. Wrappers are looked into, and of
    several equal ones the first counts. Functions of JAX are known by name, others by identity.

    stable: only names and constants were found, so that the facts are the same in every process.
    """

    def __init__(self, e):
        self.stable, self._facts = True, {}
        self._equation(e)

    def facts(self) -> tuple:
        return tuple(self._facts)

    def _add(self, *fact):
        self._facts[fact] = None

    def _equation(self, e):
        self._add(e.primitive.name, tuple(str(v.aval) for v in e.invars))
        for name, p in _rule_params(e).items():
            self._look_into(name, p)

    def _look_into(self, name, x):
        """Adds the facts of a parameter, or of a variable that a function closes over."""
        if type(x).__name__ == "WrappedFun":
            for transform in x.transforms:
                self._add(name, self._token(transform))
            self._add(name, self._token(x.params))
            self._look_into(name, x.f)
        elif type(x).__name__ == "JaxprEqn":
            self._equation(x)
        elif isinstance(x, functools.partial):
            self._add(name, self._token((x.args, x.keywords)))
            self._look_into(name, x.func)
        elif isinstance(x, types.FunctionType) and _is_ours_or_jax(x.__module__) and "<locals>" in x.__qualname__:
            self._add(x.__module__, x.__qualname__, self._token(x.__defaults__))
            for cell, value in _closure(x).items():
                self._look_into(f"{x.__qualname__} {cell}", value)
        else:
            self._add(name, self._token(x))

    def _token(self, x):
        if (found := _simple(x)) is not None:
            return found
        if isinstance(x, (tuple, list)):
            return (self._token(type(x)), *map(self._token, x))
        if isinstance(x, dict):
            return tuple((str(k), self._token(v)) for k, v in x.items())
        if isinstance(x, (jax.tree_util.PyTreeDef, jax.core.ShapedArray)):
            return str(x)
        module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
        if _is_ours_or_jax(module):
            if type(x).__name__ in _PLUMBING:
                return None
            if isinstance(name, str) and "<locals>" not in name:
                return module, name
            if isinstance(x, types.FunctionType):
                return module, name, self._token(_closure(x)), self._token(x.__defaults__)
        self.stable = False
        return id(x)


def _closure(f) -> dict:
    """What a function closes over, by name."""
    cells = {}
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        with contextlib.suppress(ValueError):  # it is empty
            cells[name] = cell.cell_contents
    return {"fn": cells["fn"]} if f.__qualname__ == "_memoize.<locals>.memoized" else cells


def _is_ours_or_jax(module) -> bool:
    """module: a name, or None, which code that was run by `exec` has."""
    return isinstance(module, str) and module.split(".")[0] in ("jax", "jaxlib", "jaxkern")
