"""Which CUDA kernels run an operation: ask for them, or force them, in tests and benchmarks.

    tiers.softmax(49152, 1024, dtype="bfloat16")     -> "warp", say; works without a GPU
    tiers.index_add(169343, 1166243, 128)            -> "sort"
    tiers.reduction(1, 1 << 26)                      -> "split"
    with tiers.force("block"): jaxkern.softmax(x)

The tiers are described in the plans: jaxkern/_ops/softmax/plan.py, jaxkern/_ops/reduction/plan.py,
jaxkern/_ops/cross_entropy/plan.py, and the plans of index_add and its family in
jaxkern/_ops/indexing/plan.py. They differ in speed and, by rounding, in the last bits of the
result, never in meaning.
"""

import contextlib
import functools
import operator
import typing

import jax
import jax.numpy as jnp

from jaxkern._core import lowering
from jaxkern._ops.cross_entropy import plan as loss_plan
from jaxkern._ops.reduction import plan as reduction_plan
from jaxkern._ops.softmax import plan as softmax_plan

NAMES = softmax_plan.ALGORITHMS
REDUCTIONS = reduction_plan.ALGORITHMS
LOSS_TIERS = loss_plan.ALGORITHMS
PLANS = ("unique", "small", "sorted", "sort", "narrow", "atomic", "gather")


class Device(typing.NamedTuple):
    """What the choice of a tier depends on."""

    sm_count: int
    compute_capability: int  # 10 * major + minor
    shared_memory: int  # bytes that a block can opt in to


H200 = Device(132, 90, 227 * 1024)
A100 = Device(108, 80, 163 * 1024)

# Part of the key of every cache of traces and programs, and local to a thread.
_forced = jax.make_user_context("auto")


@contextlib.contextmanager
def force(name: str):
    """Every operation inside the block, by this thread, that has such a tier or plan runs on CUDA in it.

    Jitted ones too. A tier that cannot run a problem (see `fits`) raises an error when it is executed. "auto" ends
    the force of an enclosing block. The CPU has no tiers and takes no notice.

    >>> import jax.numpy as jnp, jaxkern
    >>> with jaxkern.tiers.force("streaming"):
    ...     jaxkern.softmax(jnp.zeros(4)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    if name not in (*NAMES, *PLANS, "auto"):
        raise ValueError(f"jaxkern.tiers.force: no tier {name!r}, there are {', '.join((*NAMES, *PLANS))}")
    with _forced(name):
        yield


def forced(names=NAMES) -> str:
    """The one of `names`, by default the tiers of softmax, that this thread forces, or "auto"."""
    return _forced.value if _forced.value in names else "auto"


def softmax(
    rows: int,
    width: int,
    inner: int = 1,
    dtype="float32",
    *,
    log: bool = False,
    backward: bool = False,
    masked: bool = False,
    fused: bool = False,
    device: Device | None = None,
) -> str:
    """The tier that runs a softmax over the middle dimension of [rows, width, inner] by default.

    Args:
        rows, width, inner: how many rows there are before the axis, their width, and the number of
            elements after the axis (1 when it is the last one).
        dtype: float16, bfloat16, float32 or float64.
        log: log_softmax.
        backward: the gradient, which reads two arrays.
        masked: with a `where`.
        fused: with a scale, a bias, a causal limit or dropout.
        device: H200, A100 or another `Device`; this machine's GPU by default, or H200 without one.

    Raises:
        ValueError: a size is not positive, or `dtype` has no kernel. TypeError: an argument is of another type.
    """
    return _ask_softmax("softmax", softmax_plan.choose, rows, width, inner, dtype, log, backward, masked, fused, device)


def fits(
    tier: str,
    rows: int,
    width: int,
    inner: int = 1,
    dtype="float32",
    *,
    log: bool = False,
    backward: bool = False,
    masked: bool = False,
    fused: bool = False,
    device: Device | None = None,
) -> bool:
    """Whether `tier` can run that problem; arguments as for `softmax`."""
    if tier not in NAMES:
        raise ValueError(f"jaxkern.tiers.fits: no tier {tier!r}, there are {', '.join(NAMES)}")
    fits_tier = functools.partial(softmax_plan.fits, tier)
    return _ask_softmax("fits", fits_tier, rows, width, inner, dtype, log, backward, masked, fused, device)


def reduction(
    rows: int, width: int, inner: int = 1, dtype="float32", *, masked: bool = False, device: Device | None = None
) -> str:
    """The tier that runs a reduction (sum, mean, max, min, logsumexp) over the middle dimension of
    [rows, width, inner] by default; arguments and errors as for `softmax`, and `dtype` may be an integer type.
    """
    return reduction_plan.choose(*_reduction_problem("reduction", rows, width, inner, dtype, masked, device))


def reduction_fits(
    tier: str,
    rows: int,
    width: int,
    inner: int = 1,
    dtype="float32",
    *,
    masked: bool = False,
    device: Device | None = None,
) -> bool:
    """Whether `tier` can run that reduction; arguments as for `reduction`."""
    if tier not in REDUCTIONS:
        raise ValueError(f"jaxkern.tiers.reduction_fits: no tier {tier!r}, there are {', '.join(REDUCTIONS)}")
    return reduction_plan.fits(tier, *_reduction_problem("reduction_fits", rows, width, inner, dtype, masked, device))


def cross_entropy(
    rows: int,
    width: int,
    inner: int = 1,
    dtype="float32",
    *,
    which: str = "loss",
    masked: bool = False,
    device: Device | None = None,
) -> str:
    """The tier that runs a cross-entropy over the middle dimension of [rows, width, inner] by default.

    Args:
        which: "loss", "gradient", or "both" in one call.
        The others: as for `softmax`; width is the number of classes.

    Raises:
        As `softmax`.
    """
    return loss_plan.choose(*_loss_problem("cross_entropy", rows, width, inner, dtype, which, masked, device))


def cross_entropy_fits(
    tier: str,
    rows: int,
    width: int,
    inner: int = 1,
    dtype="float32",
    *,
    which: str = "loss",
    masked: bool = False,
    device: Device | None = None,
) -> bool:
    """Whether `tier` can run that problem; arguments as for `cross_entropy`."""
    if tier not in NAMES:
        raise ValueError(f"jaxkern.tiers.cross_entropy_fits: no tier {tier!r}, there are {', '.join(NAMES)}")
    problem = _loss_problem("cross_entropy_fits", rows, width, inner, dtype, which, masked, device)
    return tier in LOSS_TIERS and loss_plan.fits(tier, *problem)


def _loss_problem(function, rows, width, inner, dtype, which, masked, device):
    name = f"jaxkern.tiers.{function}"
    rows, width, inner = (_positive(name, *size) for size in (("rows", rows), ("width", width), ("inner", inner)))
    masked, dtype = _flag(name, "masked", masked), _kernel_dtype(name, dtype)
    if which not in loss_plan.PASSES:
        raise ValueError(f"{name}: which must be 'loss', 'gradient' or 'both', got {which!r}")
    return loss_plan.Problem(rows, width, inner, dtype.name, which, masked), _device(name, device)


def index_add(rows: int, count: int, inner: int = 1, dtype="float32", **problem) -> str:
    """The plan that adds `count` rows of `inner` elements onto some of `rows` by default.

    Args:
        rows, count, inner: of x and of the source along the axis, and the elements after the axis.
        dtype: float16, bfloat16, float32, float64, int32, int64 or uint32.
        op: "index_add", "segment_sum", "segment_max", "segment_min", "index_select", "segment_softmax" or
            "segment_softmax_grad".
        batch, outer: slices with indices of their own, and with the same ones; 1 each.
        index_dtype: "int32".
        indices_are_sorted, unique_indices, deterministic: as for `jaxkern.index_add`.
        device: as for `softmax`.

    Raises:
        ValueError: a size is not positive, or no kernel for a dtype. TypeError: an argument is of another type.
    """
    plan, problem, device = _indexed("jaxkern.tiers.index_add", rows, count, inner, dtype, **problem)
    return plan.choose(problem, device)


def index_add_fits(plan: str, rows: int, count: int, inner: int = 1, dtype="float32", **problem) -> bool:
    """Whether `plan` can run that problem; arguments as for `index_add`."""
    if plan not in PLANS:
        raise ValueError(f"jaxkern.tiers.index_add_fits: no plan {plan!r}, there are {', '.join(PLANS)}")
    module, problem, device = _indexed("jaxkern.tiers.index_add_fits", rows, count, inner, dtype, **problem)
    return module.fits(plan, problem, device)


def _indexed(
    name,
    rows,
    count,
    inner,
    dtype,
    *,
    op="index_add",
    batch=1,
    outer=1,
    index_dtype="int32",
    indices_are_sorted=False,
    unique_indices=False,
    deterministic=True,
    device=None,
):
    """The plan module of an operation, a problem of it, and the device."""
    from jaxkern._ops.indexing import gather_plan, plan  # which ask this module what is forced
    from jaxkern._ops.segment_softmax import plan as softmax_plan

    batch, outer, rows, count, inner = (
        _positive(name, *size)
        for size in (("batch", batch), ("outer", outer), ("rows", rows), ("count", count), ("inner", inner))
    )
    is_sorted, is_unique, deterministic = (
        _flag(name, *hint)
        for hint in (
            ("indices_are_sorted", indices_are_sorted),
            ("unique_indices", unique_indices),
            ("deterministic", deterministic),
        )
    )
    device, dtype, index_dtype = (
        _device(name, device),
        _dtype(name, "dtype", dtype),
        _dtype(name, "index_dtype", index_dtype),
    )
    if index_dtype not in lowering.INTEGER_DTYPES:
        raise ValueError(f"{name}: no kernel for indices of dtype {index_dtype}")
    if op in ("segment_softmax", "segment_softmax_grad"):
        problem = softmax_plan.Problem(batch, outer, rows, count, inner, _kernel_dtype(name, dtype).itemsize, is_sorted)
        return softmax_plan, problem, device
    if op not in (*plan.REDUCTIONS, "index_select"):
        raise ValueError(f"{name}: no kernel for operation {op}")
    if dtype.name not in plan.DTYPES:
        raise ValueError(f"{name}: no kernel for dtype {dtype}")
    problem = plan.Problem(
        op, dtype, index_dtype, batch, outer, rows, count, inner, is_sorted, is_unique, deterministic
    )
    return gather_plan if op == "index_select" else plan, problem, device


def _ask_softmax(function, answer, rows, width, inner, dtype, log, backward, masked, fused, device):
    name = f"jaxkern.tiers.{function}"
    sizes = [_positive(name, *size) for size in (("rows", rows), ("width", width), ("inner", inner))]
    flags = [
        _flag(name, *flag) for flag in (("log", log), ("backward", backward), ("masked", masked), ("fused", fused))
    ]
    problem = softmax_plan.Problem(*sizes, _kernel_dtype(name, dtype).name, *flags)
    return answer(problem, _device(name, device))


def _reduction_problem(function, rows, width, inner, dtype, masked, device):
    name = f"jaxkern.tiers.{function}"
    rows, width, inner = (_positive(name, *size) for size in (("rows", rows), ("width", width), ("inner", inner)))
    masked, dtype = _flag(name, "masked", masked), _dtype(name, "dtype", dtype)
    known = lowering.KERNEL_DTYPES | lowering.INTEGER_DTYPES
    if dtype not in known:
        raise ValueError(f"{name}: no kernel for dtype {dtype}, there are {', '.join(sorted(d.name for d in known))}")
    return reduction_plan.Problem(rows, width, inner, dtype.name, masked), _device(name, device)


def _positive(name, argument, value, limit=1 << 63) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be an int, got {value!r}")
    if not 1 <= number < limit:
        raise ValueError(f"{name}: {argument} must be {'positive' if number < 1 else f'below {limit}'}, got {number}")
    return number


def _flag(name, argument, value) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be True or False, got {value!r}")
    return value


def _dtype(name, argument, value):
    try:
        known = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name}: {argument} must be a dtype or the name of one, got {value!r}") from None
    if value is None:  # numpy takes it for float64
        raise ValueError(f"{name}: no kernel for {argument} None")
    return known


def _kernel_dtype(name, value):
    dtype = _dtype(name, "dtype", value)
    if dtype not in lowering.KERNEL_DTYPES:
        raise ValueError(
            f"{name}: no kernel for dtype {dtype}, there are "
            f"{', '.join(sorted(d.name for d in lowering.KERNEL_DTYPES))}"
        )
    return dtype


def _device(name, device) -> Device:
    device = this_device() if device is None else device
    if not isinstance(device, Device):
        raise TypeError(f"{name}: device must be a jaxkern.tiers.Device or None, got {type(device).__name__}")
    return Device(*(_positive(name, f"device.{field}", n, 1 << 31) for field, n in device._asdict().items()))


def this_device() -> Device:
    """The first GPU that JAX sees, or an H200 where there is none."""
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return H200
    major, minor = map(int, gpu.compute_capability.split("."))
    # Bytes of shared memory a block can opt in to, by architecture; CUDA programming guide, table
    # "technical specifications per compute capability".
    shared = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}
    return Device(gpu.core_count, 10 * major + minor, 1024 * shared.get((major, minor), 227))
