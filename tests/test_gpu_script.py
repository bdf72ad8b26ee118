"""benchmarks/gpu.sh runs everything that there is, with one GPU or several: its commands, noted by programs that stand for them."""

import os
import pathlib
import re
import subprocess

import pytest

from benchmarks.__main__ import OPERATIONS
from benchmarks.sanitize import FAMILIES

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "gpu.sh"


@pytest.fixture
def commands(tmp_path):
    """A function of the settings of the script that returns its commands, each with the GPUs that it sees."""
    noted = tmp_path / "noted"
    for name in ("python3", "compute-sanitizer"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "${{CUDA_VISIBLE_DEVICES-all}} ${{TEST_GPUS-}} $*" >> {noted}\n')
        program.chmod(0o755)

    def run(**settings):
        environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "TEST_GPUS")}
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", **settings}
        done = subprocess.run(
            [SCRIPT, tmp_path / "out"], env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        return noted.read_text().splitlines(), done.stdout

    return run


@pytest.mark.parametrize("gpus", [1, 2])
def test_all_is_run(gpus, commands):
    noted, table = commands(GPUS=str(gpus), SANITIZE_TOOLS="racecheck")
    own = {"all"} if gpus == 1 else {"0", "1"}
    seen = lambda pattern: [(line.split()[0], m) for line in noted for m in re.findall(pattern, line)]

    measured = [(gpu, name) for gpu, name in seen(r"-m benchmarks (\w+) --out") if name not in ("programs", "sharding")]
    assert sorted(name for _, name in measured) == sorted(OPERATIONS)
    assert {gpu for gpu, _ in measured} == own
    assert seen(r"-m benchmarks (programs|sharding) --out") == [("all", p) for p in ("programs", "sharding")[:gpus]]

    sanitized = seen(r"benchmarks.sanitize --only (\S+)")
    assert sorted(name for _, names in sanitized for name in names.split(",")) == sorted(FAMILIES)
    assert {gpu for gpu, _ in sanitized} == own

    tests = [line for line in noted if "-m pytest" in line]
    assert len(tests) == gpus and all(line.startswith("all") for line in tests)
    assert gpus == 1 or (" 0,1 -m" in tests[0] and "-n 4" in tests[0] and "tests/test_sharding.py" in tests[1])
    assert table.count(" passed ") == len(noted)


def test_gpus_that_are_visible_are_used(commands):
    noted, _ = commands(CUDA_VISIBLE_DEVICES="5,7", STAGES="tests bench", OPERATIONS="softmax norm")
    assert {line.split()[0] for line in noted if "benchmarks softmax" in line or "benchmarks norm" in line} == {
        "5",
        "7",
    }
    assert any(line.startswith("5,7 5,7 -m pytest") for line in noted)
