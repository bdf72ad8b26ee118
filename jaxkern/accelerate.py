"""accelerate, install and explain: plain JAX programs on jaxkern, without a change to them.

The lowering rules and replaced functions are in _accelerate; what they take is decided by _accelerate/gate.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import typing
import warnings
from collections.abc import Callable, Iterable

import jax
import jax.core
import numpy as np

from jaxkern._accelerate import cumulative, functions, groups, loops, passes, replace, rules
from jaxkern._accelerate.checked import compared
from jaxkern._core import arrays, compat, decisions, package, registry, switch, validate
from jaxkern._core.decisions import Decision, Explanation
from jaxkern._core.switch import Settings

__all__ = ["CheckError", "Decision", "Explanation", "accelerate", "explain", "install", "installed", "uninstall"]

package.publish(__name__, Decision, Explanation)

# The relative error that `check` allows by default, by the type of an operation that was taken: what plain JAX may lose
# in a 16-bit sum, or in a step of training in float32.
TOLERANCE = {"bfloat16": 2**-4, "float16": 2**-6, "float32": 2**-12, "float64": 2**-36}

# Platforms without kernels, where JAXKERN_EXPLAIN=1 prints what a GPU might run on kernels.
OTHERS = ("cpu", "rocm", "tpu")

# What `explain` says below its table on a machine without a GPU.
ELSEWHERE = "This is the plan for an NVIDIA H200. JAX has no NVIDIA GPU here: on this machine, XLA runs all operations."

_sessions = itertools.count(1)


class CheckError(ArithmeticError):
    """The accelerated function gave another result than the plain one."""


class accelerate(contextlib.ContextDecorator):
    """Runs plain JAX code on jaxkern, in a `with` block or as a decorator, wherever that is faster.

    Inside the block, programs of this thread are compiled such that these operations run on jaxkern:

    * "scatter_add", "scatter_max", "scatter_min": scatters of rows: `x.at[i].add`, `jax.ops.segment_sum`, jraph's models,
      the gradients of `x[i]`, `jnp.take` and `flax.linen.Embed`
    * "logsumexp": `jax.nn.logsumexp`, `jax.scipy.special.logsumexp`
    * "softmax": the gradient of `jax.nn.softmax`; in float32, "rows" take it instead where they are on
    * "dot_product_attention": the softmax in `jax.nn.dot_product_attention`, in 16 bits, with its masks
    * "log_softmax": the gradient of `jax.nn.log_softmax` in 16 bits
    * "softmax_cross_entropy": `optax.softmax_cross_entropy_with_integer_labels`, loss and gradient
    * "scan": loops that are elementwise over lanes: `jax.lax.scan`, `jax.lax.fori_loop`, `jax.lax.map`,
      `jax.lax.while_loop` to a known count; their gradients
    * "while_loop": while loops in which each lane stops on its own: under `jax.vmap`, or with `jnp.any` over lanes as
      condition
    * "associative_scan": `jax.lax.associative_scan` of a function that is elementwise over lanes
    * "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp": `jnp.cumsum`, `jnp.cumprod`, and the functions of these
      names in `jax.lax`
    * "top_k": `jax.lax.top_k`, `jax.lax.approx_max_k`, `jax.lax.approx_min_k`
    * "sort": `jnp.sort`, `jnp.argsort` and `jax.lax.sort` by one key; where only some elements at an end are used, a
      selection in place of the sort: `jnp.sort(x)[..., :k]`, `jnp.argsort(-x)[:k]`, `jnp.median`, `jnp.percentile`
    * "searchsorted": `jnp.searchsorted` and `jnp.digitize`, in one array
    * "bincount": scatter-adds of one number: `jnp.bincount`, `jnp.histogram`, `x.at[ids].add(1)`
    * "ragged_dot": `jax.lax.ragged_dot` and the gradient of its rows, in the layout that XLA's product reads
    * "rows": what a program computes with rows by `jnp.mean`, `jnp.sum`, `jnp.max`: norms, masked softmax, losses, and
      their gradients

    log_softmax is taken on request alone, by `only`. LayerNorm and RMSNorm of other libraries are rows; `jaxkern.layer_norm`
    and `jaxkern.rms_norm` are functions to call in their place.

    If gathers of rows and elementwise arithmetic compute the updates of a scatter, as in `segment_sum(x[senders] *
    w[:, None], receivers)`, one kernel runs the whole chain, and no array of edges x features is stored.

    A case is taken only where it was measured, or is estimated, to be faster; `explain` shows which cases are. Functions that
    are already compiled are compiled again for the block, and JAX keeps both versions. Put the block around the call of a
    jitted function, or the decorator above `jax.jit`: JAX lowers a program, and differentiates eager code, after the function
    inside `jax.jit` has returned.

    Args:
        only: a name, or several, of operations to take, and no others. By default all but the ones on request.
        without: names of operations not to take.
        check: as a decorator: calls run the plain function as well, on copies of the arguments, and compare the results.
            True, or the error to allow, relative to the largest element of each array. An array may also differ by a 64th of
            this error, relative to the largest element of all arrays in the same result. On the CPU, jaxkern's references
            run in place of its kernels. Raises `CheckError`.
        force: takes every case that the kernels can run, whatever its size, also on the CPU, where jaxkern's references
            run in place of its kernels. For tests.
        export: also in programs that `jax.export` makes, which then need `disabled_checks=jaxkern.export_checks()`.
        deterministic: takes every scatter-add of floating-point numbers that kernels can run, whatever its size, and adds
            in a fixed order. By default rows of at most 15 numbers are added in no fixed order, as XLA adds them.
        tune: the GPU times each region of rows once, as XLA runs it and as one kernel, while a program that has it is
            compiled. These times decide in place of estimates. They are kept in the cache folder.

    Selections, sorts, searches and counts have the bits of plain JAX, and equal elements its order where JAX says which
    that is (not so in `jax.lax.approx_max_k` and with `is_stable=False`). Other results differ by rounding. Sums of 16-bit
    numbers are made in float32. Sums of rows of more than 15 numbers have the same bits in every run, with `deterministic`
    all sums that are taken. Otherwise results differ only in these cases: the gradient of a softmax is 0 where the softmax
    is 0, even if a cotangent is infinite or NaN; the loss or the gradient of a row of logits that holds +inf may be inf or
    NaN where optax has NaN or 0; if a program converts logits from bfloat16 to float32 for
    `optax.softmax_cross_entropy_with_integer_labels`, their float32 gradient has the precision of bfloat16; and False times
    an infinity or NaN is NaN, as in eager JAX, where XLA may compile the product as a select.

    Raises:
        ValueError: a name is unknown, or `check` is negative.
        TypeError: `check` is used in a `with` statement, or under jit, grad or vmap; or a generator or coroutine is decorated,
            whose body runs after the call.

    Warns:
        FutureWarning: a name is "layer_norm" or "rms_norm". These were operations, and have no effect any more.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> step = jax.jit(jax.grad(lambda table, ids: (table[ids] ** 2).sum()))
    >>> with jaxkern.accelerate():
    ...     gradient = step(jnp.ones((3, 2)), jnp.array([0, 2, 2]))
    >>> gradient[:, 0].tolist()
    [2.0, 0.0, 4.0]
    """

    CheckError = CheckError

    def __init__(
        self,
        only: str | Iterable[str] | None = None,
        without: str | Iterable[str] = (),
        check: bool | float = False,
        *,
        force: bool = False,
        export: bool = False,
        deterministic: bool = False,
        tune: bool = False,
    ):
        self._settings = _settings(only, without, force, export, deterministic, tune)
        if not isinstance(check, (bool, np.bool_)) and validate.number("accelerate", "check", check) < 0:
            raise ValueError(f"jaxkern.accelerate: check must not be negative, got {check}")
        # None: calls are not checked. 0.0 is a number: it allows no difference.
        self._check = None if check is False or check is np.False_ else check
        self._entered: list = []

    def _recreate_cm(self):
        again = accelerate.__new__(type(self))
        again._settings, again._check, again._entered = self._settings, self._check, []
        return again

    def __enter__(self):
        if self._check is not None:
            raise TypeError("jaxkern.accelerate: check compares the results of a function: accelerate(check=True)(f)")
        if switch.current() is None and compat.stages():
            compat.warn_once(switch.INSIDE)
        context = _active(self._settings)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exception):
        return self._entered.pop().__exit__(*exception)

    def __call__(self, f):
        if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f):
            raise TypeError(
                f"jaxkern.accelerate: {f.__name__} runs after the call that the decorator sees: use a `with` block inside it"
            )
        if self._check is None:
            return super().__call__(f)
        tolerance = None if isinstance(self._check, (bool, np.bool_)) else float(self._check)
        return _checked(f, self._settings._replace(session=next(_sessions)), tolerance)


_installed = False


def install(
    only: str | Iterable[str] | None = None,
    without: str | Iterable[str] = (),
    *,
    force: bool = False,
    export: bool = False,
    deterministic: bool = False,
    tune: bool = False,
) -> None:
    """`accelerate` for the whole process: every thread, until `uninstall`. The arguments are the same, but for `check`.

    Args:
        only: a name, or several, of operations to take, and no others, as for `accelerate`.
        without: names of operations not to take.
        force: takes every case that the kernels can run.
        export: also in programs that `jax.export` makes.
        deterministic: adds all floating-point scatters in a fixed order.
        tune: lets times of regions of rows decide, in place of estimates.

    Raises:
        ValueError: a name is unknown.
        TypeError: an argument is of the wrong type.

    >>> import jaxkern
    >>> jaxkern.install(without="scatter_max")
    >>> jaxkern.uninstall()
    """
    global _installed
    settings = _settings(only, without, force, export, deterministic, tune, name="install")
    _prepare(settings)
    if not switch.set_default(settings):
        compat.warn_once("jaxkern.install: this version of JAX has no default to set; use `with jaxkern.accelerate()`")
        return
    if not _installed:
        replace.acquire(functions.TARGETS)
    _installed = True


def uninstall() -> None:
    """Ends `install`; nothing happens where nothing is installed.

    >>> import jaxkern
    >>> jaxkern.uninstall()
    """
    global _installed
    if _installed:
        switch.set_default(None)
        replace.release()
    _installed = False


def installed() -> tuple[str, ...]:
    """The names of the operations that programs of this thread run on jaxkern; empty if it runs plain JAX.

    It sees `install` and an enclosing `accelerate`.

    Returns:
        A tuple of names, which `only` and `without` take.

    >>> import jaxkern
    >>> jaxkern.install(only=["logsumexp", "scatter_add"])
    >>> jaxkern.installed()
    ('scatter_add', 'logsumexp')
    >>> jaxkern.uninstall()
    >>> jaxkern.installed()
    ()
    """
    settings = switch.current()
    return tuple(name for name in switch.OPERATIONS if settings is not None and name in settings.operations)


def explain(f: Callable, platform: str = "cuda", **jit_options: typing.Any) -> Callable[..., Explanation]:
    """A function of the arguments of `f` that reports which operations of `f` would run on jaxkern; it does not run `f`.

    It uses the settings of the enclosing `accelerate` or `install`; without one, the settings of `accelerate()`. Gradients of
    log_softmax, which are taken only on request, are listed as left, with the reason "on request: ...". Rows are not listed
    where their arrays have fewer than 65536 elements: these take no longer than the launch of a kernel.

    Args:
        f: a callable, jitted or not: a function, a method, `equinox.filter_jit(f)`, a partial function.
        platform: what to compile for; a GPU need not be there, unless `f` has callbacks such as `jax.debug.print`.
        jit_options: for `jax.jit`, such as static_argnums, if `f` is not jitted. Without them, arrays and
            `jax.ShapeDtypeStruct` among the arguments, and in pytrees of them, are traced; all else is passed as it is.

    Returns:
        A function that returns an `Explanation`, a sequence of records, one for each operation: its name, whether it is
        taken, why, its line in the source, and how many bytes a kernel moves for it. Printed, it is a table. `.taken` and
        `.left` are lists of the records that are taken and left.

    Raises:
        TypeError: `f` is not callable; or a keyword is no option of `jax.jit`, or is given although `f` is jitted. Errors of
            `f` itself are raised as they are.
        ValueError: `platform` is none of "cuda", "cpu", "rocm" and "tpu".

    The environment variable JAXKERN_EXPLAIN=1 prints the same for every program that is compiled.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> table, ids = jnp.zeros((1000, 64), jnp.bfloat16), jnp.zeros(4096, jnp.int32)
    >>> found = jaxkern.explain(jax.grad(lambda t, i: t[i].sum()))(table, ids)
    >>> found[0].operation, found[0].taken, found[0].reason
    ('scatter_add', True, '16-bit sums')
    """
    validate.function("explain", "f", f)
    try:
        validate.choice("explain", "platform", platform, ("cpu", "cuda", "rocm", "tpu"))
    except ValueError as error:
        if not isinstance(platform, str):
            error.add_note("explain returns a function of the arguments of f: write explain(f)(*arguments)")
        raise
    _check_options(f, jit_options)

    def explained(*args, **kwargs) -> Explanation:
        settings = switch.current() or _settings(None, (), False, False, False, False)
        listed = frozenset(switch.LISTED) - settings.operations
        settings = settings._replace(
            operations=settings.operations | listed,
            listed=listed,
            session=next(_sessions),  # found in no cache
        )
        jitted, args, kwargs = _traceable(f, jit_options, args, kwargs)
        with decisions.recorded() as found, _active(settings):
            _register(platform)
            jitted.trace(*args, **kwargs).lower(lowering_platforms=(platform,))
        if platform != "cuda" and not settings.force:
            why = switch.no_kernels(platform)
            found = [dataclasses.replace(d, taken=False, reason=why) for d in found]
        return Explanation(found, ELSEWHERE if platform == "cuda" and not registry.gpu_present() else "")

    return explained


_JITTED = type(jax.jit(lambda: None))


def _check_options(f, options):
    """Raises a TypeError if `explain` cannot pass these keyword arguments to `jax.jit`."""
    settings = [name for name in options if name in inspect.signature(accelerate).parameters]
    if settings:
        block = f"with jaxkern.accelerate({', '.join(f'{n}={options[n]!r}' for n in settings)}):"
        raise TypeError(
            f"jaxkern.explain: {settings[0]} is an argument of accelerate, which explain takes from the block around it: `{block}`"
        )
    unknown = [name for name in options if name not in inspect.signature(jax.jit).parameters]
    if unknown:
        raise TypeError(
            f"jaxkern.explain: {unknown[0]} is no option of jax.jit; arguments of f belong to the call of what explain returns: "
            "explain(f)(*arguments)"
        )
    if options and isinstance(f, _JITTED):
        raise TypeError(f"jaxkern.explain: {next(iter(options))} is for jax.jit, and f is jitted already")


def _traceable(f, options, args, kwargs):
    """A jitted function that calls `f`, and its arguments: the arrays among the arguments of `f`, if it is not jitted."""
    if isinstance(f, _JITTED):
        return f, args, kwargs
    if options:
        return jax.jit(f, **options), args, kwargs
    function, operands = arrays.of_arrays(f, args, kwargs)
    return jax.jit(function), operands, {}


# ---- settings


def _settings(only, without, force, export, deterministic, tune, name="accelerate") -> Settings:
    """The settings that these arguments of the function `name` stand for, which the user's code has called."""
    if callable(only) and name == "accelerate":
        raise TypeError(
            "jaxkern.accelerate: only is a function; as a decorator: @jaxkern.accelerate(), with parentheses"
        )
    only = switch.DEFAULT if only is None else _operations(name, "only", only)
    without = _operations(name, "without", without)
    force, export = validate.flag(name, "force", force), validate.flag(name, "export", export)
    deterministic = validate.flag(name, "deterministic", deterministic)
    tune = validate.flag(name, "tune", tune)
    return Settings(frozenset(only) - frozenset(without), force, export, deterministic=deterministic, tune=tune)


def _operations(function, argument, given) -> tuple[str, ...]:
    try:
        names = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:  # nothing that is iterated over
        names = (given,)
    if not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"jaxkern.{function}: {argument} must be the name of an operation or several names, got {validate.shown(given)}"
        )
    for n in names:
        if n in switch.FORMER:
            message = f"jaxkern.{function}: {argument} has no operation {n!r} any more: {switch.FORMER[n]}"
            warnings.warn(message, FutureWarning, stacklevel=4)
        elif n not in switch.OPERATIONS:
            raise ValueError(
                f"jaxkern.{function}: {argument} has no operation {n!r}, there are {', '.join(switch.OPERATIONS)}"
            )
    return tuple(n for n in names if n not in switch.FORMER)


def _prepare(settings) -> None:
    """Puts the lowering rules in place."""
    for platform in ("cuda", *(("cpu",) if settings.force else ()), *(OTHERS if decisions.printed() else ())):
        _register(platform)


def _register(platform):
    rules.register(platform)
    loops.register(platform)
    cumulative.register(platform)
    groups.register(platform)
    passes.register()


@contextlib.contextmanager
def _active(settings):
    _prepare(settings)
    replace.acquire(functions.TARGETS)
    try:
        with switch.using(settings):
            yield
    finally:
        replace.release()


# ---- check


def _checked(f, settings, tolerance):
    taken: set = set()  # types of the operations that were taken, by all calls so far

    @functools.wraps(f)
    def both(*args, **kwargs):
        copies = jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) else a, (args, kwargs))
        with switch.using(None):
            plain = f(*copies[0], **copies[1])
        with decisions.recorded() as found, _active(settings):
            result = f(*args, **kwargs)
        taken.update(d.dtype for d in found if d.taken)
        allowed = tolerance
        if allowed is None:
            allowed = max([TOLERANCE.get(t, 0) for t in taken], default=0) or TOLERANCE["float32"]
        name = getattr(f, "__name__", repr(f))
        if wrong := compared(name, plain, result, allowed):
            raise CheckError(f"jaxkern.accelerate(check=True): {wrong}\n{Explanation(found)}")
        return result

    return both
