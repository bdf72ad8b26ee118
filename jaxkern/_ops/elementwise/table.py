"""The table of elementwise operations: one row each.

A row defines everything about an operation except its arithmetic: the kernels, the primitive, the public function and its
documentation, the reference, the tests, the benchmark and the list in the documentation are made from it. The arithmetic is a
functor in ffi/kernels/elementwise/functors.h or activations.h; the derivative has a functor of its own. The module has no
imports of the package, so that `python jaxkern/_ops/elementwise/table.py` prints that list.
"""

import typing


class Row(typing.NamedTuple):
    name: str
    functor: str  # the derivative's is <functor>Grad
    like: str  # the same in JAX, or a function of reference.py: the reference, and what tests compare with
    summary: str
    arrays: tuple[str, ...] = ("x",)
    parameters: tuple[tuple[str, float | None], ...] = ()  # scalars and their defaults; None: has none
    types: str = "float"  # a key of SIGNATURES
    gradient: tuple[int, ...] = ()  # the arrays that <functor>Grad differentiates by; JAX differentiates by the others
    uses: tuple[int, ...] | None = None  # the arrays that it reads beside the cotangent; None: all
    gated: bool = False  # the two arrays may be the halves of one
    part_of: str = ""  # the public function, written by hand, that chooses this row
    domain: tuple[float, float] = (-6.0, 6.0)  # tests and benchmarks take their numbers from here


FLOATS = ("float16", "bfloat16", "float32", "float64")
# The types that kernels exist for: the types that T may be, operands, result. A parameter has the type that T is
# computed in.
SIGNATURES = {
    "float": (FLOATS, ("T",), "T"),
    "number": ((*FLOATS, "int32"), ("T",), "T"),
    "test": (FLOATS, ("T",), "bool"),
    "compare": ((*FLOATS, "int32"), ("T",), "bool"),
    "logical": (("bool",), ("T",), "T"),
    "select": ((*FLOATS, "int32", "bool"), ("bool", "T", "T"), "T"),
}
CAST_TYPES = (*FLOATS, "int8", "uint8", "int32", "bool")


def _unary(name, functor, like, summary, **more):
    return Row(name, functor, like, summary, **{"gradient": (0,), **more})


def _binary(name, functor, like, summary, **more):
    return Row(name, functor, like, summary, **{"arrays": ("x", "y"), **more})


_POSITIVE = (0.01, 50.0)

ACTIVATIONS = (
    _unary("relu", "Relu", "jax.nn.relu(x)", "max(x, 0)", types="number"),
    _unary(
        "leaky_relu",
        "LeakyRelu",
        "jnp.where(x >= 0, x, negative_slope * x)",
        "x, or negative_slope x below 0",
        parameters=(("negative_slope", 0.01),),
    ),
    _unary(
        "elu",
        "Elu",
        "jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x)))",
        "x, or alpha (exp(x) - 1) below 0",
        parameters=(("alpha", 1.0),),
    ),
    _unary(
        "celu",
        "Celu",
        "jnp.maximum(x, 0) + alpha * jnp.expm1(jnp.minimum(x, 0) / alpha)",
        "x, or alpha (exp(x / alpha) - 1) below 0",
        parameters=(("alpha", 1.0),),
    ),
    _unary("selu", "Selu", "jax.nn.selu(x)", "1.0507 elu(x, 1.6733)"),
    _unary(
        "gelu_erf",
        "GeluErf",
        "x * 0.5 * jax.lax.erfc(-x * 0.7071067811865476)",
        "x Phi(x), Phi the normal distribution",
        part_of="gelu",
    ),
    _unary(
        "gelu_tanh",
        "GeluTanh",
        "gelu_tanh(x)",
        "the same with 0.5 (1 + tanh(0.798 (x + 0.0447 x^3))) for Phi",
        part_of="gelu",
    ),
    _unary("quick_gelu", "QuickGelu", "x * jax.nn.sigmoid(1.702 * x)", "x sigmoid(1.702 x)"),
    _unary("silu", "Silu", "jax.nn.silu(x)", "x sigmoid(x)"),
    _unary("mish", "Mish", "jax.nn.mish(x)", "x tanh(softplus(x))"),
    _unary("sigmoid", "Sigmoid", "jax.nn.sigmoid(x)", "1 / (1 + exp(-x))"),
    _unary("log_sigmoid", "LogSigmoid", "jax.nn.log_sigmoid(x)", "log(sigmoid(x))"),
    _unary("softplus", "Softplus", "jax.nn.softplus(x)", "log(1 + exp(x))"),
    _unary("soft_sign", "SoftSign", "jax.nn.soft_sign(x)", "x / (1 + |x|)"),
    _unary("hard_swish", "HardSwish", "jax.nn.hard_swish(x)", "x hard_sigmoid(x)"),
    _unary("hard_sigmoid", "HardSigmoid", "jax.nn.hard_sigmoid(x)", "min(max(x + 3, 0), 6) / 6"),
    _unary("hard_tanh", "HardTanh", "jax.nn.hard_tanh(x)", "x between -1 and 1, those beyond"),
    _unary(
        "hard_shrink",
        "HardShrink",
        "jnp.where(jnp.abs(x) <= lambd, 0, x)",
        "0 where |x| <= lambd, x elsewhere",
        parameters=(("lambd", 0.5),),
    ),
    _unary(
        "soft_shrink",
        "SoftShrink",
        "jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, 0 * x))",
        "x brought nearer to 0 by lambd, or to 0",
        parameters=(("lambd", 0.5),),
    ),
    _unary(
        "threshold",
        "Threshold",
        "jnp.where(x <= threshold, value, x)",
        "x, or value where x <= threshold",
        parameters=(("threshold", None), ("value", None)),
    ),
    _unary("tanh", "Tanh", "jnp.tanh(x)", "hyperbolic tangent"),
    _unary("square_relu", "SquareRelu", "jnp.square(jax.nn.relu(x))", "relu(x)^2"),
)
GATED = (
    Row("glu", "Glu", "x * jax.nn.sigmoid(gate)", "x sigmoid(gate)", ("x", "gate"), gradient=(0, 1), gated=True),
    Row("swiglu", "Swiglu", "x * jax.nn.silu(gate)", "x silu(gate)", ("x", "gate"), gradient=(0, 1), gated=True),
    Row(
        "geglu_erf",
        "GegluErf",
        "x * (gate * 0.5 * jax.lax.erfc(-gate * 0.7071067811865476))",
        "x gelu(gate)",
        ("x", "gate"),
        gradient=(0, 1),
        gated=True,
        part_of="geglu",
    ),
    Row(
        "geglu_tanh",
        "GegluTanh",
        "x * gelu_tanh(gate)",
        "the same with tanh",
        ("x", "gate"),
        gradient=(0, 1),
        gated=True,
        part_of="geglu",
    ),
)
UNARY = (
    _unary("abs", "Abs", "jnp.abs(x)", "absolute value", types="number"),
    _unary("negative", "Negative", "jnp.negative(x)", "-x", types="number", gradient=()),
    _unary("reciprocal", "Reciprocal", "jnp.reciprocal(x)", "1 / x"),
    _unary("square", "Square", "jnp.square(x)", "x^2", types="number"),
    _unary("sqrt", "Sqrt", "jnp.sqrt(x)", "square root", domain=_POSITIVE),
    _unary("rsqrt", "Rsqrt", "jax.lax.rsqrt(x)", "1 / sqrt(x)", domain=_POSITIVE),
    _unary("exp", "Exp", "jnp.exp(x)", "e^x"),
    _unary("expm1", "Expm1", "jnp.expm1(x)", "e^x - 1, accurate near 0"),
    _unary("log", "Log", "jnp.log(x)", "natural logarithm", domain=_POSITIVE),
    _unary("log1p", "Log1p", "jnp.log1p(x)", "log(1 + x), accurate near 0", domain=(-0.9, 50.0)),
    _unary("sin", "Sin", "jnp.sin(x)", "sine of radians"),
    _unary("cos", "Cos", "jnp.cos(x)", "cosine of radians"),
    _unary("erf", "Erf", "jax.lax.erf(x)", "error function"),
    _unary("erfc", "Erfc", "jax.lax.erfc(x)", "1 - erf(x), accurate where that is small"),
    _unary("sign", "Sign", "jnp.sign(x)", "-1, 0 or 1", types="number", gradient=()),
    _unary("floor", "Floor", "jnp.floor(x)", "the next integer below", gradient=()),
    _unary("ceil", "Ceil", "jnp.ceil(x)", "the next integer above", gradient=()),
    _unary("round", "Round", "jnp.round(x)", "the nearest integer, halves to even", gradient=()),
    _unary("isnan", "IsNan", "jnp.isnan(x)", "whether x is NaN", types="test", gradient=()),
    _unary("isinf", "IsInf", "jnp.isinf(x)", "whether x is inf or -inf", types="test", gradient=()),
    _unary(
        "isfinite", "IsFinite", "jnp.isfinite(x)", "whether x is neither NaN nor infinite", types="test", gradient=()
    ),
    _unary("logical_not", "LogicalNot", "jnp.logical_not(x)", "not x", types="logical", gradient=()),
    _unary("scale", "Scale", "x * alpha", "x times a scalar", parameters=(("alpha", None),)),
)
BINARY = (
    _binary("add", "Add", "x + y", "x + y", types="number"),
    _binary("subtract", "Subtract", "x - y", "x - y", types="number"),
    _binary("multiply", "Multiply", "x * y", "x y", types="number", gradient=(0, 1)),
    _binary("divide", "Divide", "x / y", "x / y", gradient=(0, 1)),
    _binary(
        "maximum", "Maximum", "jnp.maximum(x, y)", "the larger one; NaN if either is", types="number", gradient=(0, 1)
    ),
    _binary(
        "minimum", "Minimum", "jnp.minimum(x, y)", "the smaller one; NaN if either is", types="number", gradient=(0, 1)
    ),
    _binary("power", "Power", "jnp.power(x, y)", "x^y", gradient=(0, 1), domain=(0.1, 4.0)),
    _binary("fmod", "Fmod", "jnp.fmod(x, y)", "the remainder of x / y, with the sign of x", gradient=(0, 1)),
    _binary("equal", "Equal", "x == y", "x == y", types="compare"),
    _binary("not_equal", "NotEqual", "x != y", "x != y", types="compare"),
    _binary("less", "Less", "x < y", "x < y", types="compare"),
    _binary("less_equal", "LessEqual", "x <= y", "x <= y", types="compare"),
    _binary("greater", "Greater", "x > y", "x > y", types="compare"),
    _binary("greater_equal", "GreaterEqual", "x >= y", "x >= y", types="compare"),
    _binary("logical_and", "LogicalAnd", "jnp.logical_and(x, y)", "x and y", types="logical"),
    _binary("logical_or", "LogicalOr", "jnp.logical_or(x, y)", "x or y", types="logical"),
    _binary("logical_xor", "LogicalXor", "jnp.logical_xor(x, y)", "either x or y", types="logical"),
)
TERNARY = (
    Row(
        "fma",
        "Fma",
        "x * y + z",
        "x y + z in one rounding",
        ("x", "y", "z"),
        types="number",
        gradient=(0, 1),
        uses=(0, 1),
    ),
    Row(
        "where",
        "Where",
        "jnp.where(condition, x, y)",
        "x where the condition holds, y elsewhere",
        ("condition", "x", "y"),
        types="select",
        gradient=(1, 2),
        uses=(0,),
    ),
    Row("add3", "Add3", "x + y + z", "x + y + z", ("x", "y", "z"), types="number"),
    Row("lerp", "Lerp", "x + weight * (y - x)", "x + weight (y - x)", ("x", "y", "weight"), gradient=(0, 1, 2)),
    Row(
        "clamp",
        "Clamp",
        "jnp.minimum(jnp.maximum(x, min), max)",
        "x between min and max",
        ("x", "min", "max"),
        types="number",
        gradient=(0,),
    ),
)
GROUPS = {"activations": ACTIVATIONS, "gated": GATED, "one operand": UNARY, "two": BINARY, "three": TERNARY}
ROWS = tuple(row for rows in GROUPS.values() for row in rows)


def groups() -> dict[str, list[str]]:
    """The public functions of each group, which docs/api/elementwise.md lists."""
    names = {group: list(dict.fromkeys(row.part_of or row.name for row in rows)) for group, rows in GROUPS.items()}
    names["one operand"].append("cast")
    return names


class Kernel(typing.NamedTuple):
    """One signature that has a kernel."""

    name: str  # the row's, with _grad for the derivative
    functor: str
    operands: tuple[str, ...]  # types; parameters last, and before them in a derivative the cotangent
    results: tuple[str, ...]
    parameters: int
    computing: str  # f32, f64 or s32
    coarse: bool  # results have 16 bits: arithmetic that is exact to about 13 is enough

    @property
    def key(self) -> str:
        return f"{self.name}({','.join(self.operands)})->{','.join(self.results)}"


def computing(type_: str) -> str:
    return {"float64": "float64", "int32": "int32", "bool": "int32"}.get(type_, "float32")


def kernels_of(row: Row):
    """The kernels of a row: forward, then its derivative's."""
    types, operands, result = SIGNATURES[row.types]
    if len(operands) == 1:
        operands *= len(row.arrays)
    for t in types:
        c, coarse = computing(t), t in ("float16", "bfloat16")
        arrays = tuple(t if o == "T" else o for o in operands)
        parameters = (c,) * len(row.parameters)
        out = t if result == "T" else result
        yield Kernel(row.name, row.functor, arrays + parameters, (out,), len(parameters), c, coarse)
        if row.gradient and t in FLOATS:
            uses = range(len(arrays)) if row.uses is None else row.uses
            yield Kernel(
                f"{row.name}_grad",
                f"{row.functor}Grad",
                (*(arrays[k] for k in uses), t, *parameters),
                (t,) * len(row.gradient),
                len(parameters),
                c,
                coarse,
            )


def cast_kernels():
    """Casts from and to a floating-point type; the arithmetic in between is wide enough to round once."""
    for a in CAST_TYPES:
        for b in CAST_TYPES:
            if a != b and (a in FLOATS or b in FLOATS):
                wide = "float64" in (a, b) or (a == "int32" and b != "float32")
                yield Kernel("cast", "Cast", (a,), (b,), 0, "float64" if wide else "float32", False)


def kernels():
    for row in ROWS:
        yield from kernels_of(row)
    yield from cast_kernels()


if __name__ == "__main__":
    for group, names in groups().items():
        print(f"{group}: {', '.join(names)}")
