"""Pack a version of Triton for another Python, to carry to a borrowed machine without network.

  python -m scripts.kernels.pack_triton 3.9.0 --python 3.12 --out packed

downloads the wheel for x86-64 Linux with pip, leaves out what compiling and launching kernels does
not need, strips the shared libraries where `strip` is installed, and writes
packed/triton-3.9.0-cp312.tar.xz. It prints the size of the archive, and the command that unpacks
and uses it. The exit code is 1 if the archive exceeds --limit.

Left out: the backend for AMD, the profiler and CUPTI, headers except `cuda.h`, and plugins. Of the
two assemblers, `ptxas` and `ptxas-blackwell`, only the one is packed that this version of Triton
takes for the architectures of --sm; the other name is a link to it. (3.9.0 takes `ptxas-blackwell`,
13.4, for sm_90 and above; `ptxas`, 12.9, gives other machine code. Kernels for further
architectures may be assembled by another program than in the wheel.)
"""

import argparse
import ast
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PLATFORMS = ("manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
LEFT_OUT = re.compile(
    r"triton/(backends/amd|profiler|plugins|include|instrumentation|tools/triton_to_gluon_translator)/"
    r"|triton/(FileCheck|_C/libproton\.so)"
    r"|triton/backends/nvidia/(lib/cupti|include/(?!cuda\.h$)|bin/nvlink)"
    r"|triton[^/]*\.dist-info/(RECORD|licenses/)|triton/_C/include/"
)
"""Files of the wheel that are left out, by the beginning of their names."""
COMPILER, PROGRAMS = "triton/backends/nvidia/compiler.py", "triton/backends/nvidia/bin"
ASSEMBLERS = {"ptxas": "ptxas", "ptxas_blackwell": "ptxas-blackwell"}
"""Programs by the names that Triton's settings have for them."""
STRIPPED = re.compile(r"\.so(\.\d+)*$")
MIB = 1 << 20


def download(version: str, python: str, folder: Path) -> Path:
    """The wheel of a version of Triton for a version of Python, from pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", python, "--dest", str(folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, f"triton=={version}"], check=True)
    (wheel,) = folder.glob("triton-*.whl")
    return wheel


def assembler(source: str, capability: int) -> str:
    """The program that a version of Triton assembles with, from the source of its compiler.

    Executes the function `get_ptxas` alone, since the package is for another Python.

    Example:
        >>> assembler("def get_ptxas(arch) -> knobs.Tool: return knobs.nvidia.ptxas", 90)
        'ptxas'
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_ptxas":
            node.returns, node.decorator_list = None, []
            names: dict[str, Any] = {"knobs": SimpleNamespace(nvidia=SimpleNamespace(**ASSEMBLERS))}
            exec(compile(ast.Module([node], []), COMPILER, "exec"), names)
            return str(names["get_ptxas"](capability))
    raise ValueError(f"{COMPILER} has no function get_ptxas")


def unpack(wheel: Path, folder: Path, capabilities: Sequence[int]) -> None:
    """Write the files of a wheel that are not left out, with their permissions."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(COMPILER).decode()
        kept = sorted({assembler(source, capability) for capability in capabilities})
        linked = {f"{PROGRAMS}/{name}" for name in set(ASSEMBLERS.values()) - set(kept)}
        for entry in archive.infolist():
            name = entry.filename
            if entry.is_dir() or name in linked or LEFT_OUT.match(name):
                continue
            path = Path(archive.extract(entry, folder))
            path.chmod(0o755 if entry.external_attr >> 16 & 0o111 else 0o644)
            if name.endswith(".dist-info/entry_points.txt"):
                lines = path.read_text(encoding="utf-8").splitlines()
                backends = [line for line in lines if not line.startswith(("amd", "proton"))]
                path.write_text("\n".join(backends) + "\n", encoding="utf-8")
    for name in linked:
        (folder / name).symlink_to(kept[0])


def strip(folder: Path) -> None:
    """Strip symbols that the linker does not need from shared libraries."""
    program = shutil.which("strip")
    if program is None:
        print("strip is not installed: shared libraries are packed as they are", file=sys.stderr)
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file() and STRIPPED.search(path.name):
            subprocess.run([program, "--strip-unneeded", str(path)], check=True)


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a folder as .tar.xz; the filter for x86 makes programs smaller."""
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 9},
    ]
    with (
        lzma.open(archive, "wb", filters=filters) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)


def main() -> None:
    """Write the archive and print how it is used."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.kernels.pack_triton",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("version", metavar="VERSION", help="such as 3.9.0")
    add("--python", default="3.12", metavar="VERSION", help="default: %(default)s")
    add("--out", type=Path, default=Path(), metavar="DIR", help="default: the current folder")
    add("--wheel", type=Path, metavar="FILE", help="pack this wheel, download nothing")
    sm = "compute capability x 10 of the devices; default: 90"
    add("--sm", type=int, nargs="+", default=[90], help=sm)
    add("--limit", type=int, default=60, metavar="MIB", help="default: %(default)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tag = "cp" + "".join(options.python.split(".")[:2])
    archive = options.out / f"triton-{options.version}-{tag}.tar.xz"
    with tempfile.TemporaryDirectory(prefix="pack_triton-") as temporary:
        folder = Path(temporary, "unpacked")
        wheel = options.wheel or download(options.version, options.python, Path(temporary))
        unpack(wheel, folder, options.sm)
        strip(folder)
        pack(folder, archive)
    size = archive.stat().st_size
    print(f"{archive}: {size / MIB:.1f} MiB")
    print("to use it, in the top folder of the repository:")
    print(f"  mkdir -p newer_triton && tar -xJf {archive} -C newer_triton")
    print("  PYTHONPATH=$PWD/newer_triton TRITON_BACKENDS_IN_TREE=1 scripts/gpu_check")
    if size > options.limit * MIB:
        sys.exit(f"pack_triton: larger than --limit, {options.limit} MiB")


if __name__ == "__main__":
    main()
