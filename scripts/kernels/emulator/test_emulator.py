"""What the emulator reports of small kernels written by hand, and the example of its page."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from . import Fault, Unsupported
from .execution import Request, Run, decoded
from .global_memory import SPACING, Buffer, GlobalMemory
from .judge import SEEN, Judge

FOLDER = Path(__file__).resolve().parent

KERNEL = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small(.param .u64 .ptr .global .align 1 p0, .param .u64 .ptr .global .align 1 p1
)
.reqntid 64
{{
  .reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
  ld.param.b64 %rd0, [p0];  ld.param.b64 %rd1, [p1];
  mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;
  shl.b32 %r2, %r0, 2;  cvt.u64.u32 %rd2, %r2;
  add.s64 %rd3, %rd0, %rd2;  add.s64 %rd4, %rd1, %rd2;
  mov.b32 %r3, global_smem;  add.s32 %r3, %r3, %r2;  xor.b32 %r4, %r3, 128;
  {body}
  ret;
}}
"""
"""%rd3, %rd4: the thread's element of two tensors; %r3, %r4: its word of shared memory, and that of
a thread of the other warp.
"""
BARRIER = "bar.sync 0;"
SHARED = "ld.global.b32 %r5, [%rd3]; st.shared.b32 [%r3], %r5; {} ld.shared.b32 %r6, [%r4];"
FAULTS = {
    "race: read of what another warp wrote": SHARED.format(""),
    "shared memory that nobody wrote": "ld.shared.b32 %r6, [%r4];",
    "outside of tensors": "ld.global.b32 %r5, [%rd3+256];",
    "address outside of memory": "ld.shared.b32 %r5, [%r3+4096];",
    "misaligned address": "ld.global.b32 %r5, [%rd3+2];",
    "read of memory that nobody wrote": "ld.global.b32 %r5, [%rd4];",
    "two threads write one place": "st.global.b32 [%rd1], %r0;",
    "race: write where another program wrote": (
        "setp.eq.u32 %p1, %r1, 0; @%p1 st.global.b32 [%rd4], %r0; @!%p1 st.global.b32 [%rd4], %r0;"
    ),
    "asynchronous copy before it was waited for": (
        "cp.async.ca.shared.global [%r3+0], [%rd3+0], 0x4; cp.async.commit_group;"
        "cp.async.wait_group 1; bar.sync 0; ld.shared.b32 %r6, [%r4];"
    ),
    "executed by some threads of a warp": (
        "setp.lt.u32 %p1, %r0, 5; @%p1 bra $L1; shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1; $L1:"
    ),
    "wait at several barriers": (
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra $L1; bar.sync 0; $L1: bar.sync 0;"
    ),
    "no end after": "$L1: bra.uni $L1;",
}  # fmt: skip
"""What is reported, and of which instructions."""


def run(
    body: str,
    order: str = "together",
    num_programs: int = 2,
    further: Sequence[Buffer] = (),
) -> Run:
    """Programs with two tensors of 64 numbers: the first is 0, 1, …, the second has no values.

    The further ones are at addresses between those of the two.
    """
    text = KERNEL.format(body=body.replace(";", ";\n"))
    numbers = np.arange(64, dtype=np.uint32).view(np.uint8)
    tensors = [
        Buffer("numbers", numbers, np.ones(256, np.bool_), 4, SPACING),
        *further,
        Buffer("results", numbers.copy(), np.zeros(256, np.bool_), 4, 2 * SPACING),
    ]
    request = Request(text, num_programs, 512, tensors, [SPACING, 2 * SPACING])
    return Run(request, decoded(text), order, counting=True, limit=1000)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_reported(what: str) -> None:
    with pytest.raises(Fault, match=what):
        run(FAULTS[what])


def results(memory: GlobalMemory) -> Any:
    """The second tensor."""
    return memory.data[memory.start[1] :][:256].view(np.uint32)


def test_words_are_exchanged_through_shared_memory() -> None:
    body = SHARED.format(BARRIER) + "st.global.b32 [%rd4], %r6;"
    memory = run(body, num_programs=1).memory
    np.testing.assert_array_equal(results(memory), np.arange(64) ^ 32)
    assert (memory.loaded, memory.stored) == ({"numbers": 256}, {"results": 256})


@pytest.mark.parametrize(("order", "first"), [("forward", 0), ("backward", 1), ("together", 0)])
def test_programs_execute_atomics_in_order(order: str, first: int) -> None:
    body = (
        "setp.eq.u32 %p1, %r0, 0; mov.b32 %r5, 7;"
        "@%p1 atom.global.gpu.acq_rel.add.u32 %r5, [%rd0], 1; bar.sync 0; shl.b32 %r6, %r1, 2;"
        "cvt.u64.u32 %rd5, %r6; add.s64 %rd5, %rd1, %rd5; @%p1 st.global.b32 [%rd5], %r5;"
    )
    assert results(run(body, order).memory)[[first, 1 - first]].tolist() == [0, 1]


def test_what_a_program_wrote_is_read_after_an_acquire_alone() -> None:
    body = (
        "setp.eq.u32 %p1, %r0, 0; mov.b32 %r5, 7; setp.eq.u32 %p2, %r1, 0; and.pred %p3, %p1, %p2;"
        "@%p3 st.global.b32 [%rd4], %r5; bar.sync 0;"
        "@%p1 atom.global.gpu.{}.add.u32 %r5, [%rd0], 1; bar.sync 0;"
        "not.pred %p2, %p2; and.pred %p3, %p1, %p2; @%p3 ld.global.b32 %r6, [%rd4];"
    )
    run(body.format("acq_rel"), "forward")
    with pytest.raises(Fault, match="race: read of what another program wrote"):
        run(body.format("relaxed"), "forward")


FAR = """
  mul.wide.s32 %rd5, %r1, 1073741824; shl.b64 %rd5, %rd5, 2; add.s64 %rd6, %rd3, %rd5;
  setp.eq.u32 %p1, %r1, 3; @%p1 ld.global.b32 %r5, [%rd6]; @%p1 st.global.b32 [%rd4], %r5;
"""
"""Program 3 copies a row of 64 numbers that begins at element 3 * 2^30 of the first tensor."""


def test_a_row_behind_4_gigabytes_is_read_unless_arithmetic_has_32_bits() -> None:
    row = np.arange(64, dtype=np.uint32) ** 2
    written = np.ones(256, np.bool_)
    far = [Buffer("numbers", row.view(np.uint8), written, 4, SPACING + 3 * 2**32)]
    executed = run(FAR, num_programs=4, further=far)
    memory = executed.memory
    np.testing.assert_array_equal(memory.data[memory.start[2] :][:256].view(np.uint32), row)
    judge = Judge([executed])
    narrowed = [each for each in judge.mutants() if each.kind.startswith("narrowed")]
    found = {each.original.text: judge.verdict(each) for each in narrowed}
    assert set(found.values()) <= {*SEEN}
    assert len(found) >= 4, found


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.mma %r0;",
        "bar.sync 1, 32;",
        "red.global.gpu.relaxed.max.u32 [%rd0], 1;",
        "add.sat.f32 %r5, %r5, %r5;",
        "add.s32 %r1, %clock, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r0}, {%r1}, %rd0, %p1, 1, 1, 0;",
    ],
)
def test_unknown_instructions_are_refused_by_name(text: str) -> None:
    with pytest.raises(Unsupported, match="clock" if "clock" in text else text.split()[0]):
        run(text)


Step = tuple[str, int, int]
"""What a warp does to one of three rows of words of shared memory; a barrier is of both warps."""


def text_of(step: Step) -> str:
    """A step in PTX; %r6 to %r8 are the thread's words, %p1 and %p2 its warp."""
    kind, warp, row = step
    guard, word = f"@%p{warp + 1} ", f"[%r{row + 6}]"
    return {
        "barrier": BARRIER,
        "load": f"{guard}ld.shared.b32 %r5, {word};",
        "store": f"{guard}st.shared.b32 {word}, %r0;",
        "copy": f"{guard}cp.async.ca.shared.global {word}, [%rd3+0], 0x4;cp.async.commit_group;",
        "wait": f"cp.async.wait_group {row};",
    }[kind]


def race(steps: list[Step]) -> bool:
    """Whether two warps access one row between barriers, one of them writing, or anything accesses
    a row into which a copy has not been waited for.
    """
    accesses: list[tuple[int, int, int, bool]] = []  # barriers passed, warp, row, writes
    copies: list[tuple[int, int]] = []  # warp and row; a commit for each
    num_waited = epoch = 0
    for kind, warp, row in steps:
        epoch += kind == "barrier"
        if kind == "wait":
            landed = max(num_waited, len(copies) - row)
            accesses += [(epoch, *copy, True) for copy in copies[num_waited:landed]]
            num_waited = landed
        elif kind != "barrier":
            if row in [to for _, to in copies[num_waited:]]:
                return True
            accesses.append((epoch, warp, row, kind != "load"))
            copies += [(warp, row)] * (kind == "copy")
    return any(
        a[0] == b[0] and a[1] != b[1] and a[2] == b[2] and (a[3] or b[3])
        for a, b in combinations(accesses, 2)
    )


def test_races_in_shared_memory_are_those_of_the_definition() -> None:
    random = Random(0)
    found = Counter[bool]()
    begin = "setp.lt.u32 %p1, %r0, 32; not.pred %p2, %p1; and.b32 %r2, %r2, 127; mov.b32 %r3, "
    begin += "global_smem; add.s32 %r3, %r3, %r2;"
    begin += "".join(
        f"add.s32 %r{6 + row}, %r3, {128 * row}; @%p1 st.shared.b32 [%r{6 + row}], %r0;"
        for row in range(3)
    )
    for _ in range(60):
        kinds = random.choices(("barrier", "load", "store", "copy", "wait"), (4, 3, 2, 2, 3), k=7)
        steps = [(kind, random.randrange(2), random.randrange(3)) for kind in kinds]
        body = begin + BARRIER + "".join(map(text_of, steps))
        expected = race(steps)
        found[expected] += 1
        if expected:
            with pytest.raises(Fault):
                run(body, num_programs=1)
        else:
            run(body, num_programs=1)
    assert min(found[False], found[True]) > 10


def test_the_example_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    """PTX instructions, registers and columns of the source may change with Triton: left out."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    example, expected = re.findall(
        r"^```(?:python|text)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    (tmp_path / "softmax.py").write_text(example)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    top = FOLDER.parents[2]
    environment["PYTHONPATH"] = f"{top}{os.pathsep}{environment.get('PYTHONPATH', top)}"
    command = [sys.executable, "softmax.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    changing = re.compile(r"at #.* (?=\()|:\d+(?=\)$)", re.MULTILINE)
    assert changing.sub("", done.stdout) == changing.sub("", expected), done.stderr[-2000:]
