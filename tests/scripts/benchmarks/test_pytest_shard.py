"""Parts of the tests together are all tests, and tests with the same parameters are in one part."""

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.parametrize("x", range(5))
def test_a(x): pass

@pytest.mark.parametrize("x", range(5))
def test_b(x): pass

def test_c(): pass
"""


def test_parts_are_disjoint_and_complete(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    parts = []
    for i in range(3):
        plugin = ["-p", "scripts.benchmarks.pytest_shard", "--shard", f"{i}/3"]
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *plugin, f"--rootdir={tmp_path}", str(tmp_path / "test_some.py")],
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parents[3],
        )
        names = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
        parts.append(set(names))
    assert sum(map(len, parts)) == len(set.union(*parts)) == 11
    assert all(("test_a[1]" in part) == ("test_b[1]" in part) for part in parts)
    assert all(len(part) >= 2 for part in parts)
