"""Caches of traces. What a trace depends on is part of the keys: settings of JAX, and the mesh that is set."""

import functools

import jax

SETTINGS = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_softmax_custom_jvp",
)


def remembered(most):
    """`functools.lru_cache(most)` for a function that traces."""

    def decorated(f):
        @functools.lru_cache(maxsize=most)
        def kept(settings, *args, **kwargs):
            del settings
            return f(*args, **kwargs)

        @functools.wraps(f)
        def found(*args, **kwargs):
            settings = tuple(getattr(jax.config, name, None) for name in SETTINGS)
            return kept((*settings, jax.sharding.get_abstract_mesh()), *args, **kwargs)

        return found

    return decorated
