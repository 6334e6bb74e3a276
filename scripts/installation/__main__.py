"""Check by a dry run that others can install the project: `python -m scripts.installation`.

uv resolves pyproject.toml with all extras for Linux on x86-64, as on a machine without builds of
its own: with constraints.txt, with the newest versions, and with the lower bounds. It reads
metadata alone. All packages must have a wheel. Without a package index the check is skipped; where
the environment variable CI is set, it fails.

`python -m scripts.installation hashes` writes `hashed_requirements.txt` anew.
"""

import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from scripts import TOP

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
VERSIONS = {
    "constraints.txt": ("--constraint", "constraints.txt"),
    "newest versions": (),
    "lower bounds": ("--resolution", "lowest-direct"),
}
HASHED = Path(__file__).with_name("hashed_requirements.txt")
HEADER = """\
# Every distribution of an installation under Python 3.12 on Linux (x86-64, glibc 2.28 or later):
#   pip install --require-hashes --no-deps -r scripts/installation/hashed_requirements.txt
#   pip install --no-deps --no-build-isolation .
# Written by `python -m scripts.installation hashes`.
"""
UNREACHABLE = ("error sending request", "network was disabled")
"""What uv says where it reaches no package index."""


def resolve(case: tuple[str, str]) -> str | None:
    """Why nothing fits a version of Python and a choice of `VERSIONS`; None if something does."""
    python, versions = case
    done = compile_requirements(python, "--quiet", "--all-extras", *VERSIONS[versions])
    return done.stderr if done.returncode else None


def compile_requirements(python: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What uv prints of the requirements in pyproject.toml."""
    platform = ("--python-platform", "x86_64-manylinux_2_28")
    wheels = ("--only-binary", ":all:")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config"]
    command += ["--python-version", python, *platform, *wheels, *options, "pyproject.toml"]
    known = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    return subprocess.run(
        command,
        cwd=TOP,
        env=known | {"UV_PYTHON_DOWNLOADS": "never"},
        capture_output=True,
        text=True,
    )


def write_hashes() -> None:
    """Write the requirements of `constraints.txt` for one platform, with the CUDA libraries."""
    options = (*VERSIONS["constraints.txt"], "--format", "pylock.toml")
    done = compile_requirements("3.12", *options)
    if done.returncode:
        sys.exit(f"installation: {done.stderr}")
    lines = []
    for package in tomllib.loads(done.stdout)["packages"]:
        hashes = (f"--hash=sha256:{wheel['hashes']['sha256']}" for wheel in package["wheels"])
        lines.append(" ".join([f"{package['name']}=={package['version']}", *hashes]))
    HASHED.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Print what was resolved, or why not."""
    cases = list(product(PYTHONS, VERSIONS))
    with ThreadPoolExecutor(4) as pool:
        failures = {
            case: why for case, why in zip(cases, pool.map(resolve, cases), strict=True) if why
        }
    if any(words in why for why in failures.values() for words in UNREACHABLE):
        if "CI" in os.environ:
            sys.exit("installation: no package index can be reached")
        print("installation: not checked, as no package index can be reached")
        return
    for (python, versions), why in failures.items():
        print(f"installation: Python {python}, {versions}:\n{why}", file=sys.stderr)
    if failures:
        sys.exit(1)
    print(f"installation: {', '.join(VERSIONS)} resolve with Python {', '.join(PYTHONS)}")


if __name__ == "__main__":
    write_hashes() if sys.argv[1:] == ["hashes"] else main()
