"""Runs test suites of other libraries under `jaxkern.install(force=True)`, and failing tests again in plain JAX.

    python tests/run_suites.py SUITE[=SOURCE] ... [-n WORKERS] [--files A.py ...] [-k EXPRESSION] [--only NAMES]

Suites: jraph, optax, haiku, flax, equinox and jax. SOURCE is a checkout, an unpacked sdist or an sdist (.tar.gz) that contains
the tests, best of the version that is installed. Without SOURCE, pip downloads the sdist of that version; the packages
equinox and jax leave out their tests, and need a checkout:

    git clone --branch jax-v0.11.0 https://github.com/jax-ml/jax ~/jax
    python tests/run_suites.py jraph optax jax=~/jax -n 8

Needs pytest, absl-py, the library itself, hypothesis for jax, and pytest-xdist for -n. JAX_NUM_GENERATED_CASES sets how many
cases jax generates per test.

`install(force=True)` takes every operation that kernels can run, whatever its size: on a GPU the kernels run, elsewhere
jaxkern's references stand for them. Without a GPU, every program is also lowered for CUDA.

Prints the tests that fail with jaxkern alone, the errors of lowering for CUDA that plain JAX does not raise, and how many
operations were taken in how many tests. Exits with 1 if there is such a test or such an error, or if a suite took nothing.

This file is also the plugin that pytest loads (`-p run_suites`).
"""

import argparse
import collections
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import typing
import warnings


class Suite(typing.NamedTuple):
    """package: the name on PyPI. files: glob patterns of test files, each with the tests to run of them (pytest's -k)."""

    package: str
    files: dict[str, str]
    in_sdist: bool = True


SUITES = {
    "jraph": Suite("jraph", {"jraph/_src/*_test.py": ""}),
    "optax": Suite("optax", {"optax/**/*_test.py": ""}),
    "haiku": Suite("dm-haiku", {"haiku/_src/**/*_test.py": ""}),
    "flax": Suite(
        "flax", {"tests/core/**/*_test.py": "", "tests/linen/**/*_test.py": "", "tests/nnx/**/*_test.py": ""}
    ),
    "equinox": Suite("equinox", {"tests/test_*.py": ""}, in_sdist=False),
    "jax": Suite(
        "jax",
        {
            "tests/nn_test.py": "",
            "tests/lax_numpy_indexing_test.py": "",
            "tests/sparse_bcoo_bcsr_test.py": "",
            "tests/lax_numpy_test.py": "sort or Sort or Searchsorted or SearchSorted or bincount or Bincount or Histogram or Digitize",
            "tests/lax_numpy_setops_test.py": "",
            "tests/lax_numpy_reducers_test.py": "Quantile or Percentile or Median or quantile or percentile or median",
            "tests/lax_test.py": "scatter or gather or Scatter or Gather or Sort or sort or TopK or topk or top_k",
            "tests/lax_vmap_test.py": "Scatter or Gather or Sort or TopK",
            "tests/lax_control_flow_test.py": "scan or Scan or while or While or fori or Fori or map or Map",
            "tests/lax_autodiff_test.py": "scatter or Scatter or Gather or Sort or TopK",
            "tests/ann_test.py": "",
            "tests/lax_scipy_test.py": "LogSumExp or logsumexp or Softmax or softmax or LogNdtr",
        },
        in_sdist=False,
    ),
}
RESULTS, OPTIONS = "JAXKERN_SUITES_RESULTS", "JAXKERN_SUITES_OPTIONS"


# ---- the plugin


class Lowering:
    """Lowers every program that JAX lowers for the CPU a second time, for CUDA, and keeps the errors."""

    def __init__(self):
        self.errors: list[str] = []
        self.decisions: list = []  # of jaxkern, on these programs

    def install(self):
        from jax._src.interpreters import mlir

        plain = mlir.lower_jaxpr_to_module

        @functools.wraps(plain)
        def lower(*args, **kwargs):
            if tuple(kwargs["platforms"]) == ("cpu",):
                self._lower_for_cuda(plain, args, kwargs)
            return plain(*args, **kwargs)

        mlir.lower_jaxpr_to_module = lower

    def _lower_for_cuda(self, plain, args, kwargs):
        from jax._src import util

        from jaxkern._core import decisions

        counts, util.test_event_listener = util.test_event_listener, None  # JAX's tests count lowerings
        try:
            with warnings.catch_warnings(), decisions.recorded() as found:
                warnings.simplefilter("ignore")
                plain(*args, **kwargs | {"platforms": ("cuda",)})
        except Exception as error:
            text = re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
            self.errors.append((text.splitlines() or [""])[0][:500])
        finally:
            util.test_event_listener = counts
        self.decisions += found


_lowering = Lowering()


def _provide_xla_bridge():
    """Provides `jax.lib.xla_bridge`, which jraph's tests import and which JAX has removed."""
    import jax.lib
    from jax._src import xla_bridge

    if importlib.util.find_spec("jax.lib.xla_bridge") is None:
        sys.modules["jax.lib.xla_bridge"] = jax.lib.xla_bridge = xla_bridge


def pytest_configure(config):
    """Switches jaxkern on, in every process that runs tests."""
    del config
    _provide_xla_bridge()
    options = json.loads(os.environ.get(OPTIONS, "null"))
    _lowering.install()
    if options is not None:
        import jaxkern

        jaxkern.install(**options, force=True)


def _wrapped(item):
    """Runs one test on known random numbers, and records the decisions and the errors of lowering for CUDA."""
    import numpy as np

    from jaxkern._core import decisions

    np.random.seed(0)
    _lowering.errors, _lowering.decisions = [], []
    try:
        with decisions.recorded() as found:
            return (yield)
    finally:
        taken = lambda found: collections.Counter(d.operation for d in found if d.taken)
        left = collections.Counter(f"{d.operation}: {d.reason}" for d in found if not d.taken)
        on_cuda = taken(_lowering.decisions)
        counts = {"taken": taken(found) - on_cuda, "on_cuda": on_cuda, "left": left}
        item.user_properties += [(name, dict(c)) for name, c in counts.items()]  # xdist sends plain types
        item.user_properties.append(("errors", _lowering.errors))


if "pytest" in sys.modules:
    import pytest

    pytest_runtest_call = pytest.hookimpl(wrapper=True)(_wrapped)


def _write(record):
    path = os.environ.get(RESULTS)
    if path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            print(json.dumps(record), file=file)


NOTHING = {"taken": {}, "on_cuda": {}, "left": {}, "errors": [], "message": ""}


def pytest_runtest_logreport(report):
    """Writes one line per test and subtest, in the process that reports."""
    if report.when == "call" or report.outcome != "passed":
        message = "" if report.passed else str(report.longrepr)[-2000:]
        context = getattr(report, "context", None)  # of a subtest
        test = report.nodeid if context is None else f"{report.nodeid} {context.msg or ''}{dict(context.kwargs)}"
        found = {"test": test, "nodeid": report.nodeid, "outcome": report.outcome, "message": message}
        _write(NOTHING | dict(report.user_properties) | found)


def pytest_collectreport(report):
    """Writes one line per file that cannot be imported."""
    if report.failed:
        message = str(report.longrepr)[-2000:]
        _write(NOTHING | {"test": report.nodeid, "nodeid": report.nodeid, "outcome": "error", "message": message})


# ---- sources


def source_of(name, given, folder) -> pathlib.Path:
    """The folder that contains the tests of a suite: `given`, unpacked in `folder` where it is an sdist; or downloaded."""
    package = SUITES[name].package
    if not given:
        version = importlib.metadata.version(package)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", package, "--dest", str(folder), f"{package}=={version}"]
        subprocess.run(command, check=True)
        (given,) = folder.glob("*.tar.gz")
    path = pathlib.Path(given).expanduser().resolve()
    if path.is_dir():
        return path
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (found,) = (p for p in folder.iterdir() if p.is_dir())
    return found


# ---- both runs


def run(name, source, chosen, arguments, options) -> dict[str, dict]:
    """The records of all tests by their names.

    chosen: by expression (pytest's -k), files or tests. options: of `jaxkern.install`, or None for plain JAX.
    """
    here = pathlib.Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        results, names = pathlib.Path(folder) / "results", pathlib.Path(folder) / "names"
        results.touch()
        path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, RESULTS: str(results), OPTIONS: json.dumps(options)}
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for expression, tests in chosen.items():
            names.write_text("\n".join(tests))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "run_suites", "-p", "no:cacheprovider", "--tb=short"]
            command += ["-W", "ignore", "--continue-on-collection-errors", "--rootdir", str(source), "-c", os.devnull]
            command += ["-n", str(arguments.workers)] if arguments.workers else []
            command += ["-k", expression] if expression else []
            ended = subprocess.run([*command, f"@{names}"], cwd=source, env=environment, capture_output=True, text=True)
            last = (ended.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
            print(f"{name}, {'plain' if options is None else 'with jaxkern'}: {last}", flush=True)
            if ended.returncode not in (0, 1, 5):  # 5: no test has the expression in its name
                sys.exit(f"pytest ended with {ended.returncode}:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}")
        return {r["test"]: r for r in map(json.loads, results.read_text().splitlines())}


def is_suspect(record) -> bool:
    """Whether plain JAX is to run a test, too."""
    return record["outcome"] not in ("passed", "skipped") or bool(record["errors"])


def report(own, plain, verbose=False) -> bool:
    """Prints what was taken and what is worse than in plain JAX; whether nothing is, and something was taken.

    own: the records of all tests with jaxkern. plain: of those tests among them that are suspect, without.
    """
    bad = {name: r for name, r in own.items() if r["outcome"] not in ("passed", "skipped")}
    worse = {name: r for name, r in bad.items() if name not in plain or plain[name]["outcome"] == "passed"}
    counts = collections.Counter(r["outcome"] for r in own.values())
    print(f"  {', '.join(f'{n} {outcome}' for outcome, n in sorted(counts.items()))}")
    print(f"  {len(bad) - len(worse)} of them fail without jaxkern, too; {len(worse)} do not" + (":" if worse else ""))
    for name, r in worse.items():
        print(f"    {name}" + (f"\n{r['message']}" if verbose else ""))
    known = {error for r in plain.values() for error in r["errors"]}
    errors = collections.defaultdict(list)
    for name, r in own.items():
        for error in {*r["errors"]} - known:
            errors[error].append(name)
    print(f"  {len(errors)} errors of lowering for CUDA that plain JAX does not raise" + (":" if errors else ""))
    for error, names in errors.items():
        print(f"    {error}, in {len(names)} tests: {', '.join(names if verbose else names[:3])}")
    sums = {key: collections.Counter() for key in ("taken", "on_cuda", "left")}
    for r in own.values():
        for key, found in sums.items():
            found.update(r[key])
    print(f"  {sum(bool(r['taken']) for r in own.values())} tests ran operations on jaxkern:")
    for operation, n in sorted(sums["taken"].items()):
        print(f"    {n} {operation}" + (f", {n} lowered for CUDA" if (n := sums["on_cuda"][operation]) else ""))
    if verbose:
        print("  left:", *(f"{n} {reason}" for reason, n in sums["left"].most_common()), sep="\n    ")
        print("  errors of lowering for CUDA in plain JAX:", *sorted(known), sep="\n    ")
    return not worse and not errors and bool(sums["taken"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", metavar="SUITE[=SOURCE]", help=", ".join(SUITES))
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="only the test files with these names")
    parser.add_argument("-k", dest="expression", default=None, help="only the tests whose name matches, as for pytest")
    parser.add_argument("-n", dest="workers", type=int, default=0, help="processes")
    parser.add_argument("--only", default=None, metavar="A,B", help="operations to take; by default all")
    parser.add_argument("--verbose", action="store_true", help="print messages of tests that differ, and what was left")
    arguments = parser.parse_args()

    from jaxkern._core import switch

    options = {"only": list(switch.OPERATIONS) if arguments.only is None else arguments.only.split(",")}
    fine = True
    with contextlib.ExitStack() as stack:
        for name, _, given in (suite.partition("=") for suite in arguments.suites):
            if name not in SUITES:
                parser.error(f"no suite {name!r}, there are {', '.join(SUITES)}")
            if not given and not SUITES[name].in_sdist:
                parser.error(f"the sdist of {name} has no tests: give a checkout, {name}=PATH")
            source = source_of(name, given, pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
            chosen = collections.defaultdict(list)  # files by expression
            for pattern, expression in SUITES[name].files.items():
                expression = expression if arguments.expression is None else arguments.expression
                for path in sorted(source.glob(pattern)):
                    if not arguments.files or path.name in arguments.files:
                        chosen[expression].append(str(path.relative_to(source)))
            if not chosen:
                parser.error(f"{source} has none of the test files of {name}")
            own = run(name, source, chosen, arguments, options)
            again = sorted({r["nodeid"] for r in own.values() if is_suspect(r)})
            plain = run(name, source, {"": again}, arguments, None) if again else {}
            fine = report(own, plain, arguments.verbose) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
