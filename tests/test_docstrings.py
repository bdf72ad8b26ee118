"""What `help` shows for each public name: the required sections, names of public modules only, examples that run."""

import dataclasses
import doctest
import inspect
import pydoc
import re
import sys
import traceback

import jax.numpy as jnp
import pytest

import jaxkern
import jaxkern.optax

# Private modules, as a user would read them.
PRIVATE = re.compile(r"\b_(core|ops|definitions|engines|accelerate|doctor|runtime)\b")

# Names that compute nothing with arrays: they have no derivative, move no data, and need no source.
TOOLS = {
    "Benchmark",
    "CheckError",
    "Decision",
    "Device",
    "Explanation",
    "Graph",
    "Kernel",
    "Order",
    "Quantization",
    "Routing",
    "Source",
    "accelerate",
    "benchmark",
    "choose",
    "explain",
    "export_checks",
    "fits",
    "force",
    "force_xla",
    "install",
    "installed",
    "names",
    "operations",
    "source",
    "spmm_graph",
    "this_device",
    "uninstall",
}


def _public():
    """{name: object} of what a user can call, and of the classes of what it returns."""
    found = {}
    modules = [sys.modules[f"jaxkern.{name}"] for name in ("algorithms", "accelerate", "source", "benchmark", "optax")]
    for module in (jaxkern, *modules):
        found |= {name: getattr(module, name) for name in module.__all__ if callable(getattr(module, name))}
    return {**found, "Order": sys.modules["jaxkern.segment"].Order}


PUBLIC = _public()


def _section(doc, title) -> str:
    """The indented lines below a title."""
    found = re.search(rf"^{title}[^\n]*:\n((?:    .*\n|\n)+)", doc + "\n", re.M)
    return found[1] if found else ""


def faults(name, signature, doc, fields=()) -> list[str]:
    """What a docstring lacks; signature: of the object, or None for a class that users do not make. fields: of a record."""
    tool = name in TOOLS
    parameters = [] if signature is None else list(signature.parameters)
    entries = re.findall(r"^    ([\w*]+(?:, [\w*]+)*): ", _section(doc, "Args") or _section(doc, "Attributes"), re.M)
    described = {argument.lstrip("*") for entry in entries for argument in entry.split(", ")}
    missing = [f"the argument {argument}" for argument in parameters if argument not in described]
    if signature is not None and signature.return_annotation not in (signature.empty, "None", None):
        missing += [] if _section(doc, "Returns") else ["Returns"]
    if parameters:
        missing += [] if re.search(r"^    \w+(, \w+)*: ", _section(doc, "Raises"), re.M) else ["Raises"]
    if signature is not None:
        missing += [] if re.search(r"^>>> ", doc, re.M) else ["an example"]
    missing += [f"the attribute {name}" for name in fields if name not in described]
    if not tool:
        missing += [title for title in ("Derivatives", "Cost") if not re.search(rf"^{title}: \S", doc, re.M)]
        counterpart = re.search(r"\bas\s+`[\w.]+", doc.split("\n\n")[0]) or re.search(r":\s`", doc.split("\n\n")[0])
        missing += [] if counterpart or re.search(r"^Source: \S", doc, re.M) else ["Source, or a counterpart"]
    return missing + [f"a break in the line {line!r}" for line in doc.splitlines() if len(line) > 130]


def _signature(x):
    """The signature, or None for a class that users do not make."""
    if inspect.isclass(x) and x.__name__ not in ("DelayedScale", "Graph", "Quantization", "accelerate"):
        return None
    return inspect.signature(x)


@pytest.mark.parametrize("name", PUBLIC)
def test_sections(name):
    x = PUBLIC[name]
    fields = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else getattr(x, "_fields", ())
    assert not faults(name, _signature(x), inspect.getdoc(x) or "", fields)


@pytest.mark.parametrize("name", PUBLIC)
def test_private_modules_are_not_named(name):
    x = PUBLIC[name]
    shown = pydoc.render_doc(x, renderer=pydoc.plaintext)  # with the signature, annotations and the module
    assert not PRIVATE.findall(shown + repr(x))
    assert _signature(x) is None or len(str(_signature(x))) < 600


@pytest.mark.parametrize("name", PUBLIC)
def test_example(name):
    x = PUBLIC[name]
    tests = doctest.DocTestFinder().find(x, name, module=sys.modules[x.__module__], globs={})
    assert tests, "doctest finds no docstring"
    for test in tests:
        assert not doctest.DocTestRunner(verbose=False).run(test).failed


@pytest.mark.parametrize(
    ("pattern", "lacks"),
    [
        (r"^    x: .*\n", "the argument x"),
        (r"^    score_args: .*\n", "the argument score_args"),
        (r"^Returns:\n", "Returns"),
        (r"^Raises:\n", "Raises"),
        (r"^>>> ", "an example"),
        (r"^Derivatives: ", "Derivatives"),
        (r"^Cost: ", "Cost"),
        (r"^Source: ", "Source, or a counterpart"),
    ],
)
def test_a_missing_section_is_found(pattern, lacks):
    doc = inspect.getdoc(jaxkern.softmax).replace("as `jax.nn.softmax`", "and no other")
    signature = inspect.signature(jaxkern.softmax)
    assert not faults("softmax", signature, doc)
    broken, count = re.subn(pattern, "", doc, flags=re.M)
    assert count and lacks in faults("softmax", signature, broken)


def test_errors_name_no_private_module():
    with pytest.raises(TypeError) as raised:
        jaxkern.elementwise_kernel(lambda x: jnp.sort(jnp.stack([x, -x]))[0])(1.0)
    assert not PRIVATE.findall("".join(traceback.format_exception_only(raised.value)))


def test_a_private_module_is_found():
    assert PRIVATE.findall("class jaxkern._core.device.Device") == ["core"]
    assert not PRIVATE.findall("jaxkern.accelerate, log_softmax, edge_max_core")
