"""Check by a dry run that others can install the project: `python -m scripts.installation`.

uv resolves pyproject.toml with all extras for Linux on x86-64, as on a machine without builds of
its own: with constraints.txt, with the newest versions, and with the lower bounds. It reads
metadata alone. All packages must have a wheel. Without a package index the check is skipped; where
the environment variable CI is set, it fails.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

TOP = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
VERSIONS = {
    "constraints.txt": ("--constraint", "constraints.txt"),
    "newest versions": (),
    "lower bounds": ("--resolution", "lowest-direct"),
}
UNREACHABLE = ("error sending request", "network was disabled")
"""What uv says where it reaches no package index."""


def resolve(case: tuple[str, str]) -> str | None:
    """Why nothing fits a version of Python and a choice of `VERSIONS`; None if something does."""
    python, versions = case
    platform = ("--python-platform", "x86_64-manylinux_2_28")
    wheels = ("--only-binary", ":all:")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    command += ["--python-version", python, *platform, *wheels, *VERSIONS[versions]]
    known = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    done = subprocess.run(
        [*command, "--all-extras", "pyproject.toml"],
        cwd=TOP,
        env=known | {"UV_PYTHON_DOWNLOADS": "never"},
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else None


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
    main()
