"""Signatures of primitives: what they refuse, the types of results, and operands by name. Their other rules are tested with the
operations that use them. And how few functions lead from a call to its launch."""

import itertools
import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from plans import needs_runtime

import jaxkern
from jaxkern._core import launch
from jaxkern._core.signature import AXIS, FLAT, Signature, distinct, numbered

PACKAGE = pathlib.Path(jaxkern.__file__).parent
ROWS = Signature(
    lambda params: {
        "x": "T *lead row *trail",
        "scale?": "wide row",
        **numbered("more", params["more"], "any *lead? row? *trail?"),
        "group": "float32 *lead!",
        "index?": "integer *lead *trail",
    },
    lambda operands, params: ["T *lead row *trail", "wide *lead *trail", "dtype length"],
)


def of(*shape, dtype="float32"):
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def types(x, scale, more, group, index, **params):
    given = {"axis": 2, "length": 7, "dtype": "int8", "more": len(more)} | params
    flat, params = ROWS.compress((x, scale, *more, group, index), given)
    operands, rest = ROWS.expand(flat, params)
    assert "given" not in rest and (operands.x, operands.scale, operands.group, operands.index) == (
        x,
        scale,
        group,
        index,
    )
    assert ROWS.compress(operands, rest) == (flat, params)
    return ROWS.types("jaxkern_rows", *flat, **params)


X, GROUP = of(2, 3, 5, 4, dtype="float16"), of(2, 3)


@pytest.mark.parametrize("scale", [None, of(5)])
@pytest.mark.parametrize("more", [(), (of(1, 3, 1, 4), of(2, 3, 5, 4, dtype="bool"))])
@pytest.mark.parametrize("group", [GROUP, of(1, 1)])
@pytest.mark.parametrize("index", [None, of(2, 3, 4, dtype="int8")])
def test_types_of_results(scale, more, group, index):
    found = types(X, scale, more, group, index)
    assert [(a.shape, a.dtype.name) for a in found] == [
        ((2, 3, 5, 4), "float16"),
        ((2, 3, 4), "float32"),
        ((7,), "int8"),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": of(2, 3)},
        {"scale": of(4)},
        {"scale": of(5, dtype="float16")},
        {"more": (of(2, 3, 5, 4), of(2, 3, 2, 4))},
        {"more": (of(3, 5, 4),)},
        {"group": of(1, 3)},
        {"group": of(2, 3, 1)},
        {"index": of(2, 3, 4)},
        {"index": of(2, 3, 5, dtype="int32")},
        {"axis": 4},
    ],
)
def test_operands_that_do_not_fit(wrong):
    given = {"x": X, "scale": None, "more": (), "group": GROUP, "index": None} | wrong
    with pytest.raises(ValueError, match=r"jaxkern_rows: operands do not fit: x float\d+\[2,3"):
        types(**given)


def test_a_declaration_of_the_parameters():
    signature = Signature(
        lambda params: {"a": "T m n" if params["turned"] else "T n m", "b": "a n"},
        "b m",
        layout=FLAT,
        sizes=lambda operands, params: {"n": 3},
    )
    a, b = of(3, 2), of(3)
    assert signature.types("f", a, b, turned=False).shape == (2,)
    with pytest.raises(ValueError, match="do not fit"):
        signature.types("f", a, b, turned=True)


def test_a_batch_grows_the_row_s_position_only_before_it():
    assert [AXIS.grown({"axis": 2}, group, 0)["axis"] for group in ("lead", "trail")] == [3, 2]
    assert distinct([None, "a", ("b", "a"), "b"]) == [None, "a", None, "b"]


# ---- how much lies between a call and its launch


def of_a_call(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


CALLS = {
    "softmax": (lambda x: jaxkern.softmax(x), "jaxkern_softmax", [of_a_call(64, 1024)]),
    "rms_norm": (jaxkern.rms_norm, "jaxkern_rms_norm", [of_a_call(64, 1024), of_a_call(1024)]),
    "gelu": (lambda x: jaxkern.gelu(x), "jaxkern_gelu_tanh", [of_a_call(64, 1024)]),
    "index_add": (
        lambda x, index, source: jaxkern.index_add(x, 0, index, source),
        "jaxkern_index_add",
        [of_a_call(100, 64), of_a_call(5000, dtype="int32"), of_a_call(5000, 64)],
    ),
    "scan": (
        lambda carry, xs: jaxkern.scan(lambda c, x: (c * 0.5 + x, c), carry, xs),
        "jaxkern_loop",
        [of_a_call(512), of_a_call(100, 512)],
    ),
}


@needs_runtime
@pytest.mark.parametrize("name", CALLS)
def test_at_most_ten_functions_lead_from_a_call_to_its_launch(name, monkeypatch):
    """Functions of this package on the stack where the primitive is bound, and where its plan is made while it is lowered."""
    f, primitive, operands = CALLS[name]
    found = {}

    def counted(cls, method, key_of):
        inner = getattr(cls, method)

        def counting(self, *args, **kwargs):
            files = (pathlib.Path(frame.f_code.co_filename) for frame, _ in traceback.walk_stack(None))
            own = (file.relative_to(PACKAGE) for file in files if file.is_relative_to(PACKAGE))
            # Innermost first, to the hooks of `accelerate`, which stay after a test that uses it.
            own = itertools.takewhile(
                lambda file: file.parts[0] != "_accelerate" and file.stem != "compat_rewriting", own
            )
            found[key_of(self)] = len(list(own))
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(cls, method, counting)

    counted(Primitive, "bind", lambda prim: prim.name)
    counted(launch.Plan, "__init__", lambda plan: "plan")
    jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
    assert found[primitive] + found["plan"] <= 10
