"""Loads wait for one another if the address of one depends on the result of the other."""

from pathlib import Path

import pytest

from scripts.kernels.sass import parse
from scripts.kernels.sass_loops import Located, _without_unrolled, waits

LOAD = "LDG.E.64 R4, desc[UR6][R2.64]"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (["IADD3 R4, R2, R3, RZ"], 0),
        ([LOAD, "LDG.E R6, desc[UR6][R8.64]"], 1),
        ([LOAD, "IADD3 R8, R4, 0x4, RZ", "LDG.E R6, desc[UR6][R8.64]"], 2),
        (["LDG.E.128 R4, desc[UR6][R2.64]", "LDG.E R8, desc[UR6][R6.64]"], 2),
        ([f"@!P3 {LOAD}", "LDG.E R6, desc[UR6][R4.64]"], 2),
        ([LOAD, "@P0 MOV R4, R9", "LDG.E R6, desc[UR6][R4.64]"], 2),
        ([f"@P0 {LOAD}", f"@!P0 {LOAD}"], 1),
        ([LOAD, "MOV R4, R9", "LDG.E R6, desc[UR6][R4.64]"], 1),
        ([LOAD, "ISETP.GE.AND P0, PT, R4, R1, PT", "@P0 LDG.E R6, desc[UR6][R8.64]"], 2),
        ([LOAD, "STG.E desc[UR6][R8.64], R4", "LDG.E R6, desc[UR6][R8.64]"], 1),
        ([LOAD, "STS [R8], R4", "LDS R10, [R9]", "LDG.E R6, desc[UR6][R10.64]"], 2),
        (["LDGSTS.E.128 [R3], desc[UR6][R2.64]", "LDS R10, [R9]", "LD.E R6, [R10.64]"], 2),
    ],
    ids=lambda value: " ; ".join(value) if isinstance(value, list) else str(value),
)
def test_waits_are_the_longest_chain_of_dependent_loads(code: list[str], expected: int) -> None:
    listing = "\n".join(f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate(code))
    assert waits([Located(each, ()) for each in parse(listing)]) == expected


@pytest.mark.parametrize(("copies", "kept"), [(1, 2), (2, 1), (5, 1)])
def test_whole_iterations_outside_of_their_loop_are_unrolled_ones(
    copies: int, kept: int, tmp_path: Path
) -> None:
    """Fewer instructions than an iteration has are the prologue of a pipeline."""
    source = tmp_path / "kernel.py"
    source.write_text("def f(n):\n    for i in range(n):\n        work(i)\n    store()\n")
    (instruction,) = parse(f"/*0000*/ {LOAD} ;")
    at = {line: Located(instruction, ((str(source), line),)) for line in (3, 4)}
    outside = [at[3]] * copies + [at[4]]
    assert len(_without_unrolled(outside, {0: [at[3], at[3]]})) == kept
