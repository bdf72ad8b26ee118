"""Facts that several files of the repository state: the version, the extras, the wheels of the check-list."""

import importlib.util
import pathlib
import re
import tomllib
import zipfile

import pytest

from jaxkern._core import package

ROOT = pathlib.Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("release", ROOT / "packaging" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)


def test_version_is_the_same_everywhere():
    first, *rest = release.versions_of_changelog()
    newest = rest[0] if first == "Unreleased" else first
    assert release.version() == newest == release.version_of_source()
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in rest)


@pytest.mark.parametrize("before, released", [((), True), (("Unreleased",), False), (("9.9.9",), False)])
def test_a_release_has_no_unreleased_changes(monkeypatch, before, released):
    found = release.version_of_source()
    text = "# Changes\n" + "".join(f"\n## {section}\n\n- A change.\n" for section in (*before, found, "0.0.1"))
    monkeypatch.setattr(release, "read", lambda path: text)
    monkeypatch.setattr(release, "version_of_source", lambda: found)
    if released:
        assert release.changelog() == found
    else:
        with pytest.raises(release.Missing, match=f"begins with {before[0]}"):
            release.changelog()


def test_extras_that_the_documentation_names():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for group in re.findall(r'"(?:\.|jaxkern-cuda)\[([\w,]+)\]"', path.read_text()):
            named |= set(group.split(","))
    assert {"cuda13", "test", "examples", "docs"} <= named <= set(extras)


def test_archives_have_the_name_of_the_project():
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert name == package.DISTRIBUTION and release.ARCHIVE == name.replace("-", "_")


def wheel(folder, tag, *names, size=0):
    path = folder / f"{release.ARCHIVE}-{release.version_of_source()}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, b"\0" * size)
    return path


WHOLE = (
    "jaxkern/py.typed",
    "jaxkern/_runtime.abi3.so",
    "jaxkern/kernels/softmax/rows.cuh",
    f"{release.ARCHIVE}-1.dist-info/LICENSE",
)


@pytest.mark.parametrize(
    "names, size, reason",
    [
        (WHOLE, 0, None),
        (WHOLE[1:], 0, "lacks"),
        ((*WHOLE, "tests/test_x.py"), 0, "has tests/test_x.py"),
        (WHOLE, 1_000_000, "more than"),
    ],
)
def test_wheels_of_a_release(tmp_path, names, size, reason):
    (tmp_path / f"{release.ARCHIVE}-{release.version_of_source()}.tar.gz").touch()
    for tag in ("cp311-cp311-manylinux_2_28_x86_64", "cp312-abi3-manylinux_2_28_x86_64"):
        wheel(tmp_path, tag, *names, size=size)
    if reason is None:
        assert "cp312-abi3" in release.check_wheels(tmp_path)
    else:
        with pytest.raises(release.Missing, match=reason):
            release.check_wheels(tmp_path)


def test_a_wheel_without_its_tag_is_missing(tmp_path):
    wheel(tmp_path, "cp311-cp311-linux_x86_64", *WHOLE)
    with pytest.raises(release.Missing, match="no manylinux wheel of cp311"):
        release.check_wheels(tmp_path)
