"""Which CUDA kernels run an operation: ask for them, or force them, in tests and benchmarks.

    tiers.softmax(49152, 1024, dtype="bfloat16")     -> "warp", say; works without a GPU
    tiers.index_add(169343, 1166243, 128)            -> "sort"
    with tiers.force("block"): jaxkern.softmax(x)

The tiers of softmax are described in ffi/softmax/softmax_tier.h, the plans of index_add and its family
in ffi/index_add/index_add_plan.h. They differ in speed and, by rounding, in the last bits of the
result, never in meaning.
"""

import contextlib
import typing

import jax
import jax.numpy as jnp

from jaxkern import _lowering, _registry

NAMES = ("sub_warp", "warp", "block", "cluster", "pipeline", "streaming", "split", "column")
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


def softmax(rows: int, width: int, inner: int = 1, dtype="float32", *, backward: bool = False,
            masked: bool = False, device: Device | None = None) -> str:
    """The tier that runs a softmax over the middle dimension of [rows, width, inner] by default.

    Args:
        rows, width, inner: how many rows there are before the axis, their width, and the number of
            elements after the axis (1 when it is the last one).
        dtype: float16, bfloat16, float32 or float64.
        backward: the gradient, which reads two arrays.
        masked: with a `where`.
        device: H200, A100 or another `Device`; this machine's GPU by default, or H200 without one.

    Raises:
        ValueError: `dtype` has no kernel. RuntimeError: the CPU module, which answers, is not loaded.
    """
    return _ask("softmax_tier", rows, width, inner, dtype, backward, masked, device)


def fits(tier: str, rows: int, width: int, inner: int = 1, dtype="float32", *, backward: bool = False,
         masked: bool = False, device: Device | None = None) -> bool:
    """Whether `tier` can run that problem; arguments as for `softmax`."""
    if tier not in NAMES:
        raise ValueError(f"jaxkern.tiers.fits: no tier {tier!r}, there are {', '.join(NAMES)}")
    return _ask("softmax_tier_fits", rows, width, inner, dtype, backward, masked, device, tier)


def index_add(rows: int, count: int, inner: int = 1, dtype="float32", **problem) -> str:
    """The plan that adds `count` rows of `inner` elements onto some of `rows` by default.

    Args:
        rows, count, inner: of x and of the source along the axis, and the elements after the axis.
        dtype: float16, bfloat16, float32, float64, int32, int64 or uint32.
        op: "index_add", "segment_sum", "segment_max", "segment_min" or "index_select".
        batch, outer: slices with indices of their own, and with the same ones; 1 each.
        index_dtype: "int32".
        indices_are_sorted, unique_indices, deterministic: as for `jaxkern.index_add`.
        device: as for `softmax`.

    Raises:
        ValueError: no kernel for a dtype. RuntimeError: the CPU module, which answers, is not loaded.
    """
    query, device = index_query(rows, count, inner, dtype, **problem)
    return query.plan(*device)


def index_add_fits(plan: str, rows: int, count: int, inner: int = 1, dtype="float32", **problem) -> bool:
    """Whether `plan` can run that problem; arguments as for `index_add`."""
    if plan not in PLANS:
        raise ValueError(f"jaxkern.tiers.index_add_fits: no plan {plan!r}, there are {', '.join(PLANS)}")
    query, device = index_query(rows, count, inner, dtype, **problem)
    return query.fits(plan, *device)


def index_query(rows, count, inner=1, dtype="float32", *, op="index_add", batch=1, outer=1, index_dtype="int32",
                indices_are_sorted=False, unique_indices=False, deterministic=True, device=None):
    """The problem as the CPU module takes it, which answers what it is asked, and the device."""
    module = _answering()
    if min(rows, count, inner, batch, outer) < 1:
        raise ValueError("jaxkern.tiers: rows, count, inner, batch and outer must be positive, "
                         f"got {rows}, {count}, {inner}, {batch}, {outer}")
    names = jnp.dtype(dtype).name, jnp.dtype(index_dtype).name
    return module.IndexQuery(op, *names, batch, outer, rows, count, inner, indices_are_sorted, unique_indices,
                             deterministic), device or this_device()


def _answering():
    cpu = _registry.status["cpu"]
    if cpu.module is None:
        raise RuntimeError(f"jaxkern.tiers: {cpu.reason}")
    return cpu.module


def _ask(query, rows, width, inner, dtype, backward, masked, device, *first):
    module = _answering()
    dtype = jnp.dtype(dtype)
    if dtype not in _lowering.KERNEL_DTYPES:
        raise ValueError(f"jaxkern.tiers: no kernel for {dtype}")
    if min(rows, width, inner) < 1:
        raise ValueError(f"jaxkern.tiers: rows, width and inner must be positive, got {rows}, {width}, {inner}")
    scratch = _lowering.scratch_shape((rows, width, inner), dtype, 1)
    scratch_bytes = scratch[0] * scratch[1] if scratch else 0
    return getattr(module, query)(*first, rows, width, inner, dtype.name, backward, masked, scratch_bytes,
                                  *(device or this_device()))


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
