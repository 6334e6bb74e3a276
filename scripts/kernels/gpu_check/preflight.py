"""What a computer has that the check requires, and whether the kernels are right on it.

  python -m scripts.kernels.gpu_check.preflight [--json FILE] [--dry-run]

prints versions, the device and the tools that compile kernels, then compares a tiny forward and
backward with the reference, unless `--dry-run` is given. The exit code is 2, and the last line one
sentence, if something is missing. Takes a few seconds.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 10)
PACKAGES = ("torch", "triton", "numpy", "pytest")
PEERS = ("cut_cross_entropy", "liger_kernel")
MISSING = 2
"""The exit code if something is missing."""


class MissingError(Exception):
    """What is missing, as one sentence."""


def packages() -> dict[str, Any]:
    """Versions of Python, of the required packages and of the peers that are installed."""
    if sys.version_info < LEAST_PYTHON:
        raise MissingError(f"Python 3.11 is required, this is {platform.python_version()}")
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"the package {name} is not installed")
    import numpy as np
    import torch
    import triton

    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < LEAST_TORCH:
        raise MissingError(f"torch 2.10 is required, this is {torch.__version__}")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "peers": [name for name in PEERS if importlib.util.find_spec(name)],
    }


def device() -> dict[str, Any]:
    """Name, driver, capability and free memory of the GPU."""
    import torch

    if not torch.cuda.is_available():
        raise MissingError("torch finds no CUDA device; --dry-run runs without one")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise MissingError(f"compute capability 8.0 is required, this device has {major}.{minor}")
    driver = None
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "capability": 10 * major + minor,
        "free_bytes": torch.cuda.mem_get_info()[0],
    }


def tools(capability: int) -> dict[str, Any]:
    """What Triton compiles with: a C compiler, Python's header, ptxas."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler):
        raise MissingError("no C compiler is found: install gcc or clang, or set CC")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if not header.exists():
        raise MissingError(f"{header}, which Triton's launcher includes, does not exist")
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        assembler = get_ptxas(capability)
    except (OSError, RuntimeError) as error:
        raise MissingError(f"Triton finds no ptxas: {error}") from error
    return {"c_compiler": compiler, "ptxas": f"{assembler.path} {assembler.version}"}


def support(capability: int, *, dry: bool) -> dict[str, str | None]:
    """Why the backend refuses this version of Triton, which is an error unless steps are dry."""
    from scripts.kernels.compilation import obstacle

    found = obstacle(capability)
    if found and not dry:
        newer = "put a newer Triton first on PYTHONPATH, see scripts/kernels/README.md"
        raise MissingError(f"the backend {found}; {newer}")
    return {"obstacle": found}


def comparison(capability: int) -> dict[str, str | None]:
    """How the kernels differ from the reference with rows in bf16 and fp32; None if they agree."""
    from functools import partial

    import torch

    from lm.output.backends.triton.backend import TritonBackend, failures
    from lm.output.backends.triton.tile_shapes import tf32
    from lm.output.backends.verify import Kind, difference, result_of, tiny_problem
    from scripts.kernels.compilation import compile_all, launches, moved

    half, named = torch.bfloat16, {"bf16": torch.bfloat16, "bf16*fp32": torch.float32}
    kinds = {name: Kind(half, rows, rows, tf32=tf32()) for name, rows in named.items()}
    problems = [moved(tiny_problem(kind)[0], "meta") for kind in kinds.values()]
    needed = [launch for problem in problems for launch in launches(problem, capability)]
    compile_all([(launch, capability) for launch in needed])
    compared = partial(difference, TritonBackend(), torch.device("cuda", 0))
    return {
        name: result_of(partial(compared, kind), "the kernels", failures)
        for name, kind in kinds.items()
    }


def examine(*, dry: bool) -> dict[str, Any]:
    """All facts; raises `MissingError`."""
    facts: dict[str, Any] = {}

    def add(found: dict[str, Any]) -> None:
        facts.update(found)
        print("; ".join(f"{name}: {value}" for name, value in found.items()), flush=True)

    add(packages())
    add({"device": None, "capability": 90} if dry else device())
    capability = facts["capability"]
    add(tools(capability))
    add(support(capability, dry=dry))
    from lm.training.environment import processor_name
    from scripts.benchmarks.reporting import commit

    add({"commit": commit(), "processor": processor_name()})
    facts["device"] = facts["device"] or facts["processor"]
    add({"differences": {} if dry else comparison(capability)})
    bad = [f"{dtype}: {found}" for dtype, found in facts["differences"].items() if found]
    if bad:
        raise MissingError(f"the kernels differ from the reference: {'; '.join(bad)}")
    return facts


def main() -> None:
    """Print the facts and write them as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kernels.gpu_check.preflight")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    try:
        facts = examine(dry=options.dry_run)
    except MissingError as missing:
        print(missing)
        sys.exit(MISSING)
    if options.json:
        options.json.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
