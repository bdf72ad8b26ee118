"""Runs JAX's own tests twice, as they are and under `jaxkern.install(force=True)`, and compares what passes.

    python tests/run_jax_tests.py PATH [-n WORKERS] [--files A.py ...] [-k EXPRESSION] [--only NAMES]

PATH is a checkout of JAX (https://github.com/jax-ml/jax) at the tag of the version that is installed, `jax-v0.11.0` for
instance. Needs pytest, pytest-xdist, absl-py and hypothesis. Every operation that kernels can run is taken, whatever its
size: on a GPU by the kernels, elsewhere by jaxkern's references. By default these are the tests of scatters, gathers and
segment sums, of jax.nn, and of logsumexp.

Prints the tests whose outcome differs, how many operations were taken in how many tests, and the number of outcomes; exits
with 1 if a test passes without jaxkern and not with it, or if nothing was taken.

This file is also the plugin that pytest loads in both runs (`-p run_jax_tests`).
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

# Files of JAX's tests, each with the names (pytest's -k) of the tests that are run of it; "" for all.
FILES = {
    "lax_numpy_indexing_test.py": "",
    "nn_test.py": "",
    "lax_test.py": "scatter or gather or Scatter or Gather",
    "lax_vmap_test.py": "Scatter or Gather",
    "lax_autodiff_test.py": "scatter or Scatter or Gather",
    "lax_scipy_test.py": "LogSumExp or logsumexp or Softmax or softmax or LogNdtr",
}
RESULTS, OPTIONS = "JAXKERN_JAX_TESTS_RESULTS", "JAXKERN_JAX_TESTS_OPTIONS"


# ---- the plugin


def pytest_configure(config):
    """In every process that runs tests: switches jaxkern on, where it is asked for."""
    del config
    options = json.loads(os.environ.get(OPTIONS, "null"))
    if options is not None:
        import jaxkern

        jaxkern.install(**options, force=True)


def _wrapped(item):
    """Runs one test, and counts what was taken in it."""
    from jaxkern._core import decisions

    with decisions.recorded() as found:
        result = yield
    item.user_properties.append(("taken", dict(collections.Counter(d.operation for d in found if d.taken))))
    left = collections.Counter(f"{d.operation}: {d.reason}" for d in found if not d.taken)
    item.user_properties.append(("left", dict(left)))
    return result


if "pytest" in sys.modules:
    import pytest

    pytest_runtest_call = pytest.hookimpl(wrapper=True)(_wrapped)


def pytest_runtest_logreport(report):
    """In the process that reports: one line for each test."""
    path = os.environ.get(RESULTS)
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        found = {"taken": {}, "left": {}} | dict(report.user_properties)
        found |= {"test": report.nodeid.rpartition("/")[2], "outcome": report.outcome}
        found |= {"message": "" if report.passed else str(report.longrepr)[-2000:]}
        with open(path, "a") as file:
            print(json.dumps(found), file=file)


# ---- both runs


def outcomes(tests, expressions, arguments, options):
    """What was written of each test; options: of `jaxkern.install`, or None for plain JAX."""
    here = pathlib.Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results"
        results.touch()
        path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, RESULTS: str(results), OPTIONS: json.dumps(options)}
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for file, expression in expressions.items():
            command = [sys.executable, "-m", "pytest", "-q", "-p", "run_jax_tests", "-p", "no:cacheprovider"]
            command += ["--tb=short", "-W", "ignore", "--rootdir", str(tests), "-c", os.devnull, str(tests / file)]
            command += ["-n", str(arguments.workers)] if arguments.workers else []
            command += ["-k", expression] if expression else []
            ended = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
            last = (ended.stdout.strip().splitlines() or ["nothing"])[-1]
            print(f"{'plain  ' if options is None else 'jaxkern'}  {file}: {last}", flush=True)
            if ended.returncode not in (0, 1):
                sys.exit(f"pytest ended with {ended.returncode}:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}")
        return {r["test"]: r for r in map(json.loads, results.read_text().splitlines())}


def compare(plain, own, verbose=False) -> bool:
    """Prints what differs; whether every test that passes without jaxkern passes with it, and something was taken."""
    outcome = lambda found, test: found[test]["outcome"] if test in found else "missing"
    differ = [t for t in sorted({*plain, *own}) if outcome(plain, t) != outcome(own, t)]
    worse = [t for t in differ if outcome(plain, t) == "passed"]
    for title, names in (("pass without jaxkern alone", worse), ("differ otherwise", sorted({*differ} - {*worse}))):
        print(f"\n{len(names)} tests {title}" + (":" if names else ""))
        for name in names:
            print(f"  {name}: {outcome(plain, name)}, with jaxkern {outcome(own, name)}")
            if verbose and name in own:
                print(own[name]["message"])
    sums = {name: collections.Counter() for name in ("taken", "left")}
    for found in own.values():
        for name, counts in sums.items():
            counts.update(found[name])
    print(f"\n{sum(bool(found['taken']) for found in own.values())} tests ran operations on jaxkern, in all:")
    print("\n".join(f"  {n} {name}" for name, n in sorted(sums["taken"].items())))
    if verbose:
        print("left:")
        print("\n".join(f"  {n} {name}" for name, n in sums["left"].most_common()))
    for who, found in (("plain", plain), ("with jaxkern", own)):
        counts = collections.Counter(r["outcome"] for r in found.values())
        print(f"{who}: {', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}")
    return not worse and bool(sums["taken"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path, help="a checkout of JAX, or its folder of tests")
    parser.add_argument("--files", nargs="+", default=list(FILES), metavar="FILE", help=f"by default {' '.join(FILES)}")
    parser.add_argument("-k", dest="expression", default=None, help="only the tests whose name matches, as for pytest")
    parser.add_argument("-n", dest="workers", type=int, default=0, help="processes")
    parser.add_argument("--only", default=None, metavar="A,B", help="operations to take; by default those of install()")
    parser.add_argument("--verbose", action="store_true", help="print messages of tests that differ, and what was left")
    arguments = parser.parse_args()
    tests = (arguments.path / "tests" if (arguments.path / "tests").is_dir() else arguments.path).resolve()
    chosen = {f: FILES.get(f, "") if arguments.expression is None else arguments.expression for f in arguments.files}
    missing = [f for f in chosen if not (tests / f).exists()]
    if missing:
        parser.error(f"{tests} has no {', '.join(missing)}")
    options = {} if arguments.only is None else {"only": arguments.only.split(",")}
    own = outcomes(tests, chosen, arguments, options)
    plain = outcomes(tests, chosen, arguments, None)
    return 0 if compare(plain, own, arguments.verbose) else 1


if __name__ == "__main__":
    sys.exit(main())
