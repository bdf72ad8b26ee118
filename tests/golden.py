"""Golden launch lists: for each test of plans, a hash of all launch lists that it makes, in tests/golden/.

A change that leaves these files as they are changes no kernel, grid or argument, and so no speed. A line holds a test, the
number of its launch lists and their hash, and, if they hold generated functions, a hash of the C++ of these. Such a line is
compared only under the JAX version of the file's first line: JAX's versions trace the same function differently.

After a change that is meant, rewrite the files of the tests concerned, with the newest JAX:

    pytest -n 0 tests/test_softmax_plan.py --golden write

`--golden DIR` writes the launch lists themselves under DIR instead, for `diff -r` between two commits.
"""

import contextlib
import hashlib
import pathlib
import re

import jax
import pytest

from jaxkern._core import launch

FOLDER = pathlib.Path(__file__).parent / "golden"
VERSION = "jax " + ".".join(jax.__version__.split(".")[:2])


@contextlib.contextmanager
def recorded():
    """The distinct launch lists of all plans that are made inside, as a dictionary of steps."""
    plans, init = {}, launch.Plan.__init__

    def record(plan, *args, **kwargs):
        init(plan, *args, **kwargs)
        steps = [tuple(map(_fields, launches or ())) for launches in (plan.launches, plan.unaligned)]
        plans.setdefault((plan.algorithm, plan.scratch, *steps), plan)

    launch.Plan.__init__ = record
    try:
        yield plans
    finally:
        launch.Plan.__init__ = init


def _fields(step):
    return tuple(tuple(v) if isinstance(v, list) else v for v in vars(step).values())


def _text(plan) -> str:
    lines = [f"algorithm {plan.algorithm}", f"scratch {plan.scratch}"]
    for alignment, launches in ((16, plan.launches), (1, plan.unaligned)):
        lines += [f"alignment {alignment}", *launch.lines(launches, "{0.kind}{0.index}".format)] if launches else []
    return "\n".join(lines) + "\n"


def _hash(texts) -> str:
    return hashlib.sha256("\n".join(sorted(set(texts))).encode()).hexdigest()[:16]


class Golden:
    """The golden lines of a run of tests; how: "compare", "write" or a folder."""

    def __init__(self, how: str):
        self._how, self._known, self._made = how, {}, {}

    def check(self, module: str, test: str, plans) -> None:
        """Compares what a test made with its line, or writes it."""
        if not plans:
            return
        family, texts = re.sub("^test_|_plan$", "", module), [_text(plan) for plan in plans.values()]
        sources = re.findall(r"^source .*\n", "".join(texts), re.MULTILINE)
        lists = [re.sub(r"^source .*\n", "", text, flags=re.MULTILINE) for text in texts]
        made = [str(len(set(lists))), _hash(lists), _hash(sources) if sources else "-"]
        if self._how == "write":
            self._made.setdefault(family, {})[test] = made
        elif self._how == "compare":
            version, known = self._lines(family)
            if known.get(test) != made and (version == VERSION or not sources):
                pytest.fail(
                    f"the launch lists differ from tests/golden/{family}.txt: see tests/golden.py", pytrace=False
                )
        else:
            path = pathlib.Path(self._how) / family / (re.sub(r"[^\w.,=-]+", "_", test) + ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(sorted(texts)))

    def _lines(self, family):
        if family not in self._known:
            path = FOLDER / f"{family}.txt"
            version, *lines = path.read_text().splitlines() if path.is_file() else [VERSION]
            self._known[family] = version, {test: rest for *rest, test in (line.split(" ", 3) for line in lines)}
        return self._known[family]

    def finish(self, keep: bool) -> None:
        """Writes the files; keep: with their lines of tests that did not run."""
        for family, made in self._made.items():
            lines = {**(self._lines(family)[1] if keep else {}), **made}
            text = [VERSION, *(" ".join([*rest, test]) for test, rest in sorted(lines.items()))]
            (FOLDER / f"{family}.txt").write_text("\n".join(text) + "\n")
