"""The comparison of a function's result with the plain one: `accelerate(check=True)`."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

# An array may also differ by this share of the allowed error, relative to the largest element of all arrays in the same result.
# A gradient that is zero in exact arithmetic, such as the gradient of attention's key bias, consists of rounding errors.
NOISE = 2**-6
ADVICE = (
    "Of a training step, compare the loss and the gradient: Adam and its relatives divide a gradient by its own magnitude, so one that "
    "is zero up to rounding becomes a whole step in either direction."
)


def compared(name, plain, result, allowed) -> str:
    """How the result of the function `name` differs from the plain one by more than is allowed; "" if it does not.

    allowed: the error relative to the largest element of an array.
    """
    wanted, tree = jax.tree_util.tree_flatten_with_path(plain)
    found, same = jax.tree_util.tree_flatten(result)
    if any(isinstance(x, jax.core.Tracer) for x in (*(x for _, x in wanted), *found)):
        raise TypeError(
            f"jaxkern.accelerate: check compares the values that {name} returns, which are not known under jit, grad or "
            "vmap: put the decorator above these"
        )
    if tree != same:
        return f"{name} returned {same}, plainly {tree}"
    wrong, largest = [], {}
    for path, a in wanted:
        largest[_result_of(path)] = max(largest.get(_result_of(path), 0.0), _largest(a))
    for (path, a), b in zip(wanted, found):
        error = _error(a, b, allowed, NOISE * allowed * largest[_result_of(path)])
        if error:
            wrong.append(f"  {jax.tree_util.keystr(path) or 'result'}: {error}")
    return "\n".join([f"{name} differs from the plain one", *wrong, ADVICE]) if wrong else ""


def _result_of(path):
    """The position of an array's result, where a function returns several in a tuple or list; None where it returns one."""
    return path[0] if path and isinstance(path[0], jax.tree_util.SequenceKey) else None


def _is_array(a) -> bool:
    return isinstance(a, (jax.Array, np.ndarray)) and not jnp.issubdtype(a.dtype, jax.dtypes.extended)


def _largest(a) -> float:
    """The largest finite magnitude of an array of floating-point or complex numbers; else 0."""
    if not _is_array(a) or not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    a = np.abs(np.asarray(a).astype(np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64))
    return float(np.max(a, where=np.isfinite(a), initial=0))


def _error(a, b, allowed, noise) -> str:
    """How b differs from a, if by more than `noise` and more than `allowed` times the largest element of a."""
    if not _is_array(a):
        return ""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{b.dtype}{list(b.shape)} for {a.dtype}{list(a.shape)}"
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        count = int(np.sum(np.asarray(a) != np.asarray(b)))
        return f"{count} of {a.size} elements differ" if count else ""
    kind = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = np.asarray(a).astype(kind), np.asarray(b).astype(kind)
    finite = np.isfinite(a)
    others = int(np.sum(~finite & ~((a == b) | (np.isnan(a) & np.isnan(b))) | (finite & ~np.isfinite(b))))
    if others:
        return f"{others} of {a.size} elements are NaN or infinite in one of the two alone"
    scale = np.max(np.abs(a), where=finite, initial=0)
    worst = np.max(np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), initial=0)
    if worst <= max(allowed * scale, noise):
        return ""
    return f"differs by {worst:.3g}, {worst / scale if scale else np.inf:.2g} of the largest element; {allowed:.2g} of it is allowed"
