#!/usr/bin/env python3
"""The check-list of a release: `python packaging/release.py` walks through it and prints what is missing.

    python packaging/release.py            everything: .ci/run, wheels, site; half an hour on two cores
    python packaging/release.py --quick    only what takes seconds
    python packaging/release.py --only version changelog

Exits with 1 unless every point holds. At the end it prints the commands that tag and upload, and runs none of them.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
WHEEL_BYTES = 3_000_000
ARCHIVE = "jaxkern_cuda"  # how wheels and sdist are named: the name in pyproject.toml, as file names spell it
SLOW = {"tests", "wheels", "docs"}


class Missing(Exception):
    """A point of the list does not hold; the text says why."""


def read(path: str) -> str:
    return (ROOT / path).read_text()


def run(*command: str, **options) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)
    if done.returncode:
        raise Missing(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout.strip()


def version_of_source() -> str:
    return re.search(r'^__version__ = "(.+)"$', read("jaxkern/_core/package.py"), re.M)[1]


# ---- the points


def version() -> str:
    """One version: jaxkern/_core/package.py has it, pyproject.toml reads it, and CITATION.cff names the same."""
    found = version_of_source()
    if not re.fullmatch(r"\d+\.\d+\.\d+", found):
        raise Missing(f"{found} is not of the form 1.2.3")
    if "version" not in tomllib.loads(read("pyproject.toml"))["project"]["dynamic"]:
        raise Missing("pyproject.toml has a version of its own")
    cited = re.search(r"^version: (.+)$", read("CITATION.cff"), re.M)[1]
    if cited != found:
        raise Missing(f"CITATION.cff has {cited}, the source {found}")
    return found


def versions_of_changelog() -> list[str]:
    """The headings of CHANGELOG.md, newest first. Between releases the first one is "Unreleased"."""
    return re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)


def changelog() -> str:
    """CHANGELOG.md begins with this version, and has no section "Unreleased"."""
    first = versions_of_changelog()[0]
    if first != version_of_source():
        raise Missing(f"CHANGELOG.md begins with {first}, the source is {version_of_source()}")
    return first


def metadata() -> str:
    """pyproject.toml names the places that users look for."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    if not project.get("urls"):
        raise Missing(
            "pyproject.toml has no [project.urls]: add Source, Documentation and Issues of the public repository"
        )
    return ", ".join(project["urls"])


def name() -> str:
    """The name in pyproject.toml is free on PyPI, or has versions of CHANGELOG.md alone."""
    wanted = tomllib.loads(read("pyproject.toml"))["project"]["name"]
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", wanted], capture_output=True, text=True)
    if "No matching distribution" in done.stderr:
        return f"{wanted} is free"
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.M)
    if listed is None:
        raise Missing(f"pip index versions {wanted} failed:\n{done.stderr[-500:]}")
    ours = versions_of_changelog()
    if other := [v for v in listed[1].split(", ") if v not in ours]:
        raise Missing(f"{wanted} {other[0]} on PyPI is another project: publish under another name")
    return wanted


def tree() -> str:
    """Everything is committed, and the tag of this version is free."""
    if changed := run("git", "status", "--porcelain"):
        raise Missing(f"not committed:\n{changed}")
    tag = f"v{version_of_source()}"
    if run("git", "tag", "--list", tag):
        raise Missing(f"the tag {tag} exists")
    return run("git", "rev-parse", "--short", "HEAD")


def results() -> str:
    """benchmarks/results: every file names its commit, which is in this history. (tests/test_figures.py compares figures.)"""
    wrong = []
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        environment = json.loads(path.read_text())["environment"]
        commit = environment.get("commit") or ""
        known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        if not commit or known.returncode:
            wrong.append(f"{path.name}: commit {commit or 'none'} is not in this history")
        if environment.get("jaxkern") not in (version_of_source(), None):
            wrong.append(f"{path.name}: measured with {environment['jaxkern']}")
    if wrong:
        raise Missing("\n".join(wrong))
    return "all files"


def tests() -> str:
    """.ci/run passes."""
    run("bash", ".ci/run")
    return "passed"


def wheels() -> str:
    """packaging/build_wheels.sh makes the sdist and wheels of 3 MB at most that hold what they must and no more."""
    run("bash", "packaging/build_wheels.sh", "dist")
    return check_wheels(ROOT / "dist")


def check_wheels(folder: pathlib.Path) -> str:
    found = sorted(folder.glob(f"{ARCHIVE}-{version_of_source()}-*.whl"))
    tags = [path.name.removeprefix(f"{ARCHIVE}-{version_of_source()}-").removesuffix(".whl") for path in found]
    for abi in ("cp311-cp311", "cp312-abi3"):
        if not any(tag.startswith(abi) and "manylinux" in tag for tag in tags):
            raise Missing(f"no manylinux wheel of {abi} in {folder}: {', '.join(tags) or 'none'}")
    if not (folder / f"{ARCHIVE}-{version_of_source()}.tar.gz").exists():
        raise Missing(f"no sdist in {folder}")
    for path in found:
        if path.stat().st_size > WHEEL_BYTES:
            raise Missing(f"{path.name} has {path.stat().st_size} bytes, more than {WHEEL_BYTES}")
        names = zipfile.ZipFile(path).namelist()
        for wanted in (
            r"jaxkern/py\.typed",
            r"jaxkern/_runtime\..*so",
            r"jaxkern/kernels/softmax/.*\.cuh",
            r".*/LICENSE",
        ):
            if not any(re.fullmatch(wanted, name) for name in names):
                raise Missing(f"{path.name} lacks {wanted}")
        if extra := [n for n in names if not n.startswith(("jaxkern/", f"{ARCHIVE}.libs/", f"{ARCHIVE}-"))]:
            raise Missing(f"{path.name} has {', '.join(extra[:5])}")
    return ", ".join(f"{tag}, {path.stat().st_size / 1e6:.2f} MB" for tag, path in zip(tags, found))


def docs() -> str:
    """The site is built without a warning, and every code block of the pages runs."""
    run(sys.executable, "-m", "mkdocs", "build", "--strict")
    run(sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "docs")
    return "site/"


POINTS = (version, changelog, metadata, name, tree, results, tests, wheels, docs)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="skip checks that take minutes")
    parser.add_argument(
        "--only", nargs="+", choices=[point.__name__ for point in POINTS], help="check only these points"
    )
    arguments = parser.parse_args(argv)
    missing = 0
    for point in POINTS:
        name = point.__name__
        if arguments.only and name not in arguments.only:
            continue
        if arguments.quick and name in SLOW:
            print(f"not run  {name}: {point.__doc__.splitlines()[0]}")
            missing += 1
            continue
        try:
            print(f"ok       {name}: {point()}", flush=True)
        except Missing as error:
            missing += 1
            reason = str(error).replace("\n", "\n         ")
            print(f"MISSING  {name}: {point.__doc__.splitlines()[0]}\n         {reason}", flush=True)
    if missing:
        print(f"{missing} points are open")
        return 1
    tag = f"v{version_of_source()}"
    print(f"ready. Next, by hand:\n    git tag -a {tag} -m {tag} && git push origin {tag}\n    twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
