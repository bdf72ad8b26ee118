"""Stand-ins for the layers of flax.linen, flax.nnx, equinox and haiku: the functions and classes that jaxkern.accelerate replaces there.

They have the same names, parameters and results, so that the mechanism is tested where these libraries are not installed.
"""

import jax
import jax.numpy as jnp


def _sorted(axes, rank):
    return tuple(sorted({a % rank for a in ([axes] if isinstance(axes, int) else axes)}))


def _compute_stats(
    x,
    axes,
    dtype,
    axis_name=None,
    axis_index_groups=None,
    use_mean=True,
    use_fast_variance=True,
    mask=None,
    force_float32_reductions=True,
):
    wide = jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32)
    wide = wide if force_float32_reductions else x.dtype
    x, axes = x.astype(wide), _sorted(axes, x.ndim)
    square = jnp.mean(x * x, axes, where=mask)
    if not use_mean:
        return jnp.zeros_like(square), square
    mean = jnp.mean(x, axes, where=mask)
    if use_fast_variance:
        return mean, jnp.maximum(0.0, square - mean * mean)
    return mean, jnp.mean((x - jnp.expand_dims(mean, axes)) ** 2, axes, where=mask)


def _affine(x, mean, var, scale, bias, axes, features, dtype, epsilon):
    shape = [n if d in features else 1 for d, n in enumerate(x.shape)]
    rstd = jax.lax.rsqrt(jnp.expand_dims(var, axes) + epsilon)
    given = [p.reshape(shape) for p in (scale, bias) if p is not None]
    y = (x - jnp.expand_dims(mean, axes)) * (rstd if scale is None else rstd * given[0])
    y = y if bias is None else y + given[-1]
    return y.astype(jnp.result_type(x, *given) if dtype is None else dtype)


def _normalize(
    mdl,
    x,
    mean,
    var,
    reduction_axes,
    feature_axes,
    dtype,
    param_dtype,
    epsilon,
    use_bias,
    use_scale,
    bias_init,
    scale_init,
    force_float32_reductions=True,
):
    features = _sorted(feature_axes, x.ndim)
    shape = [x.shape[d] for d in features]
    scale = mdl.param("scale", scale_init, shape, param_dtype) if use_scale else None
    bias = mdl.param("bias", bias_init, shape, param_dtype) if use_bias else None
    return _affine(x, mean, var, scale, bias, _sorted(reduction_axes, x.ndim), features, dtype, epsilon)


def _normalize_arrays(x, mean, var, scale, bias, reduction_axes, feature_axes, dtype, epsilon):
    """`_normalize` of flax.nnx."""
    axes, features = _sorted(reduction_axes, x.ndim), _sorted(feature_axes, x.ndim)
    return _affine(x, mean, var, scale, bias, axes, features, dtype, epsilon)


class Linen:
    """A linen layer that is called with parameters, or makes them: each one once."""

    def __init__(
        self, centred, dtype=None, param_dtype=jnp.float32, use_scale=True, use_bias=True, epsilon=1e-6, **more
    ):
        self.centred, self.dtype, self.param_dtype, self.epsilon = centred, dtype, param_dtype, epsilon
        self.use_scale, self.use_bias, self.axes = use_scale, use_bias and centred, more.pop("reduction_axes", -1)
        self.features = more.pop("feature_axes", self.axes)
        self.force, self.fast = more.pop("force_float32_reductions", True), more.pop("use_fast_variance", True)
        self.given, self.made = None, {}
        assert not more

    def param(self, name, init, shape, dtype):
        assert name not in self.made
        self.made[name] = init(None, shape, dtype) if self.given is None else self.given[name]
        assert self.made[name].shape == tuple(shape)
        return self.made[name]

    def init(self, key, x):
        del key
        self(x)
        return self.made

    def apply(self, params, x, mask=None):
        self.given = params
        try:
            return self(x, mask)
        finally:
            self.given, self.made = None, {}

    def __call__(self, x, mask=None):
        self.made = {}
        mean, var = _compute_stats(
            x,
            self.axes,
            self.dtype,
            use_mean=self.centred,
            mask=mask,
            use_fast_variance=self.fast,
            force_float32_reductions=self.force,
        )
        inits = jax.nn.initializers.zeros, jax.nn.initializers.ones
        types = self.dtype, self.param_dtype, self.epsilon, self.use_bias, self.use_scale
        return _normalize(self, x, mean, var, self.axes, self.features, *types, *inits, self.force)


class _Norm:
    def __init__(self, shape, eps=1e-5, use_weight=True, use_bias=True, dtype=jnp.float32):
        self.shape, self.eps, self.use_weight, self.use_bias = (shape,), eps, use_weight, use_bias
        self.weight = jnp.ones(shape, dtype) if use_weight else None
        self.bias = jnp.zeros(shape, dtype) if use_bias else None

    def normalized(self, x, centred):
        with jax.numpy_dtype_promotion("standard"):
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide - jnp.mean(wide) if centred else wide
        y = wide * jax.lax.rsqrt(jnp.mean(wide**2) + self.eps)
        y = y * self.weight.astype(y.dtype) if self.use_weight else y
        return (y + self.bias.astype(y.dtype) if self.use_bias else y).astype(x.dtype)


class LayerNorm(_Norm):
    """`equinox.nn.LayerNorm`."""

    @jax.named_scope("LayerNorm")
    def __call__(self, x, state=..., *, key=None):
        y = self.normalized(x, True)
        return y if state is ... else (y, state)


class RMSNorm(_Norm):
    """`equinox.nn.RMSNorm`."""

    @jax.named_scope("RMSNorm")
    def __call__(self, x, state=..., *, key=None):
        y = self.normalized(x, False)
        return y if state is ... else (y, state)


# ---- haiku


class hk:
    """What haiku's modules make parameters with: each is made once."""

    made: dict = {}

    @staticmethod
    def get_parameter(name, shape, dtype, init):
        if name not in hk.made:
            hk.made[name] = init(shape, dtype)
        assert hk.made[name].shape == tuple(shape)
        return hk.made[name]


class haiku:
    class LayerNorm:
        """`haiku.LayerNorm`."""

        def __init__(self, axis, create_scale, create_offset, eps=1e-5, use_fast_variance=False, param_axis=-1):
            self.axis = axis if isinstance(axis, (tuple, slice)) else (axis,)
            self.param_axis, self.eps, self.use_fast_variance = (param_axis,), eps, use_fast_variance
            self.create_scale, self.create_offset = create_scale, create_offset
            self.scale_init, self.offset_init = jnp.ones, jnp.zeros

        @jax.named_scope("LayerNorm")
        def __call__(self, inputs, scale=None, offset=None):
            axis = tuple(range(inputs.ndim)[self.axis]) if isinstance(self.axis, slice) else self.axis
            mean = jnp.mean(inputs, axis, keepdims=True)
            shape = [n if d == self.param_axis[0] % inputs.ndim else 1 for d, n in enumerate(inputs.shape)]
            shape = shape[-1:] if self.param_axis == (-1,) else shape
            if self.create_scale:
                scale = hk.get_parameter("scale", shape, inputs.dtype, init=self.scale_init)
            if self.create_offset:
                offset = hk.get_parameter("offset", shape, inputs.dtype, init=self.offset_init)
            rstd = jax.lax.rsqrt(jnp.var(inputs, axis, keepdims=True) + self.eps)
            y = (rstd if scale is None else scale * rstd) * (inputs - mean)
            return y if offset is None else y + offset

    class RMSNorm:
        """`haiku.RMSNorm`."""

        def __init__(self, axis, eps=1e-5, create_scale=True):
            self.axis, self.param_axis, self.eps, self.create_scale = (axis,), (-1,), eps, create_scale
            self.scale_init = jnp.ones

        @jax.named_scope("RMSNorm")
        def __call__(self, inputs):
            scale = 1.0
            if self.create_scale:
                scale = hk.get_parameter("scale", inputs.shape[-1:], inputs.dtype, init=self.scale_init)
            return inputs * scale * jax.lax.rsqrt(jnp.mean(jnp.square(inputs), self.axis, keepdims=True) + self.eps)
