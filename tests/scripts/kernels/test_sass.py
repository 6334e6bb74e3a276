"""Hazards of asynchronous products are found in machine code, and only where there are some."""

from pathlib import Path

import pytest

from scripts.kernels.sass import Instruction, hazards, num_register_operands, parse, written

from .processes import run_python

OVERWRITTEN = """
  /*0a70*/  DEPBAR.LE SB0, 0x3 ;
  /*0b30*/  IMAD.U32 R40, RZ, RZ, UR10 ;
  /*0bd0*/  LDS R41, [R40+0xa000] ;
  /*0d40*/  @!P1 FMUL R41, R41, 0.5 ;
  /*0fd0*/  F2FP.BF16.F32.PACK_AB R48, R48, R45 ;
  /*1040*/  FENCE.VIEW.ASYNC.S ;
  /*1080*/  WARPGROUP.ARRIVE ;
  /*1090*/  HGMMA.64x32x16.F32.BF16 R24, R48, gdesc[UR4].tnspB, R24 ;
  /*13b0*/  HGMMA.64x32x16.F32.BF16 R24, R52, gdesc[UR16].tnspB, R24, gsb0 ;
  /*13c0*/  F2FP.BF16.F32.PACK_AB R46, R17, R46 ;
  /*15a0*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
  /*15b0*/  WARPGROUP.ARRIVE ;
  /*15c0*/  HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR16].tnspB, R24 ;
  /*15d0*/  HGMMA.64x32x16.F32.BF16 R24, R44, gdesc[UR4].tnspB, R24, gsb0 ;
  /*15e0*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
  /*1750*/  @!P1 BRA 0xa70 ;
  /*1760*/  WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  /*1810*/  STG.E.128 desc[UR8][R2.64], R24 ;
  /*1820*/  EXIT ;
"""
"""By Triton 3.7.1, of a product whose left operand is computed, bf16(k exp(m - lse)) w: R40 and R41
are operands of the product at 15c0.
"""
CLEAN = """
  /*0a30*/  DEPBAR.LE SB0, 0x3 ;
  /*0b30*/  IMAD R48, R5, 0x100, R62 ;
  /*0b90*/  LDS R49, [R48+0xa000] ;
  /*0e80*/  F2FP.BF16.F32.PACK_AB R48, R11, R52 ;
  /*1040*/  FENCE.VIEW.ASYNC.S ;
  /*1050*/  WARPGROUP.ARRIVE ;
  /*1060*/  HGMMA.64x32x16.F32.BF16 R24, R48, gdesc[UR16].tnspB, R24 ;
  /*1370*/  HGMMA.64x32x16.F32.BF16 R24, R52, gdesc[UR16].tnspB, R24, gsb0 ;
  /*13e0*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
  /*1400*/  IMAD.MOV.U32 R40, RZ, RZ, R7 ;
  /*1470*/  IMAD.MOV.U32 R47, RZ, RZ, R10 ;
  /*1610*/  WARPGROUP.ARRIVE ;
  /*1650*/  HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR16].tnspB, R24 ;
  /*16a0*/  HGMMA.64x32x16.F32.BF16 R24, R44, gdesc[UR16].tnspB, R24, gsb0 ;
  /*16b0*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
  /*17f0*/  @!P1 BRA 0xa30 ;
  /*1800*/  WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  /*1810*/  STG.E.128 desc[UR8][R2.64], R24 ;
  /*1820*/  EXIT ;
"""
"""By Triton 3.9.0, of the same kernel."""
KERNEL = '''
import torch
import triton
import triton.language as tl
from scripts.kernels import sass
from scripts.kernels.emulator.execution import compiled


@triton.jit
def product(k, w, out, n):
    """bf16(exp k) w: the left operand is computed, hence in registers."""
    v, total = tl.arange(0, 64), tl.zeros([64, 64], tl.float32)
    for c0 in range(0, n, 64):
        x = tl.load(w + (c0 + v)[:, None] * 64 + v[None, :])
        e = tl.exp(tl.load(k + v[:, None] * n + (c0 + v)[None, :]).to(tl.float32))
        total = tl.dot(e.to(x.dtype), x, total)
    tl.store(out + v[:, None] * 64 + v[None, :], total)


half, single = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
binary = compiled(product, 90, half, half, single, 640, num_stages=3)
code = sass.disassemble(binary.asm["cubin"], triton.knobs.nvidia.cuobjdump.path, "-sass")
print(sass.num_register_operands(code), len(sass.hazards(code)))
'''


def test_registers_overwritten_while_a_product_reads_them_are_found() -> None:
    found = hazards(OVERWRITTEN)
    assert {(hazard.product.address, hazard.by.address) for hazard in found} == {
        (0x15C0, 0x0B30), (0x15C0, 0x0BD0), (0x15C0, 0x0D40), (0x15D0, 0x13C0),
    }  # fmt: skip
    assert str(found[0]).startswith("0xb30 IMAD.U32 R40, RZ, RZ, UR10: overwrites an operand of")


def test_registers_overwritten_after_the_wait_are_no_hazard() -> None:
    assert hazards(CLEAN) == []
    assert num_register_operands(CLEAN) == 4


@pytest.mark.parametrize(
    ("before", "after", "address"),
    [
        ("13e0*/  WARPGROUP.DEPBAR.LE gsb0, 0x1", "13e0*/  WARPGROUP.DEPBAR.LE gsb0, 0x2", 0x1400),
        ("13e0*/  WARPGROUP.DEPBAR.LE gsb0, 0x1", "13e0*/  NOP", 0x1400),
        ("1800*/  WARPGROUP.DEPBAR.LE gsb0, 0x0", "1800*/  NOP", 0x1810),
        ("1040*/  FENCE.VIEW.ASYNC.S", "1040*/  NOP", 0x1060),
        ("0b90*/  LDS R49,", "0b90*/  LDS.128 R44,", 0x0B90),
        ("0b90*/  LDS R49,", "0b90*/  SHFL.BFLY PT, R44,", 0x0B90),
        ("0b90*/  LDS R49, [R48+0xa000]", "0b90*/  FADD R3, R4, R39", 0x0B90),
    ],
)
def test_each_rule_that_is_broken_on_purpose_is_found(
    before: str, after: str, address: int
) -> None:
    assert before in CLEAN
    text = CLEAN.replace(before, after)
    assert address in {hazard.by.address for hazard in hazards(text)}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("LDG.E.128 R4, [R2.64]", 4), ("LDS.64 R4, [R3]", 2), ("LDSM.16.M88.4 R4, [R3]", 4),
        ("CS2R R4, SRZ", 2), ("CS2R.32 R4, SR_CLOCKLO", 1), ("IMAD.WIDE R4, R5, 0x4, R6", 2),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 4), ("SHFL.IDX PT, R4, R5, RZ, 0x1f", 1),
        ("LOP3.LUT P0, R4, R5, R6, RZ, 0xc0, !PT", 1), ("DADD R4, R6, R8", 2),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", 0), ("STS.128 [R4], R8", 0), ("R2UR UR4, R4", 0),
        ("LDGSTS.E.BYPASS.128 [R4], desc[UR18][R60.64], P4", 0), ("BAR.SYNC R4, R5", 0),
    ],
)  # fmt: skip
def test_the_registers_that_an_instruction_writes_are_known(text: str, count: int) -> None:
    assert list(written(Instruction(0, text))) == list(range(4, 4 + count))


def test_code_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown product: HGMMA\.SP"):
        hazards("/*0000*/ HGMMA.SP.64x32x32.F32.BF16 R24, R48, gdesc[UR4], R24 ;")
    with pytest.raises(ValueError, match="unknown target: BRX"):
        hazards("/*0000*/ BRX R4 -0x10 ;")
    assert parse("no code") == []


def test_the_installed_version_compiles_the_kernel_without_hazard(tmp_path: Path) -> None:
    """Triton's package brings the disassembler."""
    pytest.importorskip("triton.backends.nvidia")
    path = tmp_path / "kernel.py"  # Triton reads the source of a kernel from its file
    path.write_text(KERNEL)
    done = run_python(path)
    assert done.stdout == "4 0\n", done.stderr[-2000:]
