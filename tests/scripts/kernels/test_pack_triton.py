"""A packed Triton has what compiles kernels, and the assembler that its version chooses."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
FOLDER = "triton/backends/nvidia"
ALWAYS = {
    "triton/__init__.py": "x = 1",
    f"{FOLDER}/include/cuda.h": "",
    f"{FOLDER}/lib/libdevice.10.bc": "",
    "triton-3.9.0.dist-info/METADATA": "Name: triton",
}
LEFT_OUT = {
    f"{FOLDER}/include/cudaGL.h": "",
    f"{FOLDER}/lib/cupti/libcupti.so": "",
    "triton/backends/amd/compiler.py": "",
    "triton/profiler/proton.py": "",
    "triton/_C/libproton.so": "",
    "triton-3.9.0.dist-info/RECORD": "",
}
ENTRY_POINTS = "[triton.backends]\namd = triton.backends.amd\nnvidia = triton.backends.nvidia\n"
NEW = """
def get_ptxas(arch: int) -> knobs.NvidiaTool:
    if arch < 90:
        return knobs.nvidia.ptxas
    return knobs.nvidia.ptxas_blackwell
"""
OLD = """
def get_ptxas(arch: int) -> knobs.NvidiaTool:
    return knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
"""


def pack(
    folder: Path, compiler: str, *options: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The run of the program on a small wheel, and the folder that the archive unpacks into."""
    wheel, unpacked = folder / "triton-3.9.0-cp312.whl", folder / "unpacked"
    programs = {f"{FOLDER}/bin/{name}": name for name in ("ptxas", "ptxas-blackwell")}
    entry_points = {"triton-3.9.0.dist-info/entry_points.txt": ENTRY_POINTS}
    files = ALWAYS | LEFT_OUT | programs | entry_points | {f"{FOLDER}/compiler.py": compiler}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name in programs else 0o100644) << 16
            archive.writestr(entry, content)
    command = [sys.executable, "-m", "scripts.kernels.pack_triton", "3.9.0", "--wheel", str(wheel)]
    done = subprocess.run(
        [*command, "--out", str(folder), *options], capture_output=True, text=True, cwd=TOP
    )
    with tarfile.open(folder / "triton-3.9.0-cp312.tar.xz") as archive:
        archive.extractall(unpacked, filter="data")
    return done, unpacked


@pytest.mark.parametrize(
    ("compiler", "capabilities", "programs"),
    [
        (NEW, ["90"], ("ptxas-blackwell", "ptxas-blackwell")),
        (NEW, ["80"], ("ptxas", "ptxas")),
        (OLD, ["90"], ("ptxas", "ptxas")),
        (NEW, ["80", "90"], ("ptxas", "ptxas-blackwell")),
    ],
)
def test_a_packed_version_has_its_assembler_and_what_compiling_needs(
    compiler: str, capabilities: list[str], programs: tuple[str, str], tmp_path: Path
) -> None:
    done, unpacked = pack(tmp_path, compiler, "--sm", *capabilities)
    assert done.returncode == 0, done.stderr
    assert "tar -xJf" in done.stdout
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert found >= set(ALWAYS)
    assert not found & set(LEFT_OUT)
    paths = [unpacked / FOLDER / "bin" / name for name in ("ptxas", "ptxas-blackwell")]
    assert tuple(path.read_text() for path in paths) == programs
    assert all(path.stat().st_mode & 0o111 for path in paths)
    assert any(path.is_symlink() for path in paths) == (len(capabilities) == 1)
    entry_points = unpacked / "triton-3.9.0.dist-info/entry_points.txt"
    assert entry_points.read_text() == ENTRY_POINTS.replace("amd = triton.backends.amd\n", "")
