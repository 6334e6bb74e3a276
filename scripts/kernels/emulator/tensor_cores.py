"""Matrix products: mma.sync of a warp, and wgmma of a warp group, which is asynchronous."""

import re

import numpy as np

from .access import Array
from .arithmetic import numbers
from .decoder import Decoder, instruction
from .programs import Action, Mask, Programs
from .ptx import Instruction, Unsupported
from .shared_memory import PIECE

KINDS = {"bf16", "f16", "tf32"}
SWIZZLES = {1: 128, 2: 64, 3: 32}
"""Bytes over which rows of a matrix in shared memory are swizzled, by code of a descriptor."""
TF32 = np.uint32(0xFFFFE000)
"""The bits of an fp32 number that tensor cores read."""


def _numbers(bits: Array, kind: str) -> Array:
    """Words or bytes [..., n] as fp32 [..., elements in them]."""
    if kind == "tf32":
        return (bits.view(np.uint32) & TF32).view(np.float32)
    return numbers(bits.view(np.uint16), kind).astype(np.float32)


def _sizes(by: Instruction) -> tuple[int, int, int]:
    found = re.search(r"\.m(\d+)n(\d+)k(\d+)\.", ".".join(by.fields))
    if found is None:
        raise Unsupported(by.text)
    return int(found[1]), int(found[2]), int(found[3])


def _registers(programs: Programs, slots: list[int], kind: str) -> Array:
    """[warps, registers, 32, elements of a register]."""
    words = np.stack([programs.warps(slot) for slot in slots], 1)
    return _numbers(words[..., None], kind)


def _left(programs: Programs, slots: list[int], kind: str) -> Array:
    """[warps, 16, K]: register i has rows 8 (i % 2) …, columns from the half or quarter i // 2."""
    stacked = _registers(programs, slots, kind)
    warps, count, _, elements = stacked.shape
    split = stacked.reshape(warps, count // 2, 2, 8, 4, elements)
    return split.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 16, -1)


def _right(programs: Programs, slots: list[int], kind: str) -> Array:
    """[warps, K, 8]."""
    stacked = _registers(programs, slots, kind)
    warps, count, _, elements = stacked.shape
    split = stacked.reshape(warps, count, 8, 4, elements)
    return split.transpose(0, 1, 3, 4, 2).reshape(warps, -1, 8)


@instruction("mma")
def _warp_product(decoder: Decoder, by: Instruction) -> Action:
    rows, columns, _ = _sizes(by)
    kind = by.fields[-3]
    if (rows, columns) != (16, 8) or kind not in KINDS or by.fields[-4::3] != ("f32", "f32"):
        raise Unsupported(by.text)
    targets, left, right, before = [decoder.vector(each, "b32") for each in by.operands]

    def act(programs: Programs, mask: Mask) -> None:
        programs.require_whole_warps(by, mask)
        product = _left(programs, left, kind) @ _right(programs, right, kind)
        parts = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)  # [2, 2, warps, 8, 4]
        for i, (slot, old) in enumerate(zip(targets, before, strict=True)):
            part = parts[i // 2, i % 2].reshape(programs.shape)
            total = part + programs.registers[old].view(np.float32)
            programs.set(slot, total.view(np.uint32), mask)

    return act


@instruction("wgmma")
def _warpgroup(decoder: Decoder, by: Instruction) -> Action:
    if by.fields[1] == "mma_async":
        return _GroupProduct(decoder, by)
    if by.fields[1] == "fence":
        return lambda programs, mask: None
    if by.fields[1] == "commit_group":
        return lambda programs, mask: _commit(programs, by, mask)
    if by.fields[1] == "wait_group":
        pending = int(by.operands[0], 0)
        return lambda programs, mask: _wait(programs, by, mask, pending)
    raise Unsupported(by.text)


def _commit(programs: Programs, by: Instruction, mask: Mask) -> None:
    programs.shared.product_commits[programs.rows(by, mask)] += 1


def _wait(programs: Programs, by: Instruction, mask: Mask, pending: int) -> None:
    shared = programs.shared
    shared.wait_for_products(programs.rows(by, mask), pending, by)
    for name, last in list(programs.writing.items()):
        if (last < shared.product_waits[:, 0]).all():
            del programs.writing[name]


class _GroupProduct:
    """D = A Bᵀ, or D + A Bᵀ, by the four warps of a group, of matrices in shared memory.

    The result is computed at once. Until it has been waited for, registers that it writes may not
    be used, and shared memory that it reads is pinned.
    """

    def __init__(self, decoder: Decoder, by: Instruction) -> None:
        self.by, self.kind = by, by.fields[-1]
        self.rows, self.columns, self.depth = _sizes(by)
        targets, left, right, keep, *flags = by.operands
        if self.kind not in KINDS or not by.has("f32") or flags[:2] != ["1", "1"] or by.guard:
            raise Unsupported(by.text)
        if len(flags) != (2 if self.kind == "tf32" else 4):  # also if A is in registers
            raise Unsupported(by.text)
        self.targets = decoder.vector(targets, "b32")
        self.left, self.right = decoder.sources((left, right), "b64")
        self.keep = decoder.source(keep, "pred")
        self.left_transposed, self.right_transposed = flags[2:3] == ["1"], flags[3:] == ["1"]

    def __call__(self, programs: Programs, mask: Mask) -> None:
        active = programs.rows(self.by, mask)
        num_groups = programs.shape[1] // 128
        products = np.zeros((len(active), num_groups, self.rows, self.columns), np.float32)
        for group in range(num_groups):
            left, right = (
                self._operand(programs, active, group, *of)
                for of in (
                    (self.left, self.rows, self.left_transposed),
                    (self.right, self.columns, self.right_transposed),
                )
            )
            products[:, group] = left @ right.swapaxes(1, 2)
        parts = products.reshape(len(active), -1, 2, 8, self.columns // 8, 4, 2)
        parts = parts.transpose(4, 2, 6, 0, 1, 3, 5)  # [columns / 8, 2, 2, programs, warps, 8, 4]
        keep = programs.full(programs.registers[self.keep]).reshape(programs.shape)[active]
        for i, slot in enumerate(self.targets):
            part = parts[i // 4, i % 4 // 2, i % 2].reshape(len(active), -1)
            held = programs.registers[slot]
            old = np.broadcast_to(np.uint32(0) if held is None else held, programs.shape)
            new = old.copy()
            new[active] = np.where(keep, old[active].view(np.float32) + part, part).view(np.uint32)
            programs.registers[slot] = new
        for name in self.by.writes:  # the commit to wait for, by program; -1 for none
            last = programs.writing.get(name, np.full(programs.shape[0], -1, np.int32)).copy()
            last[active] = programs.shared.product_commits[active, 0]
            programs.writing[name] = last

    def _operand(
        self, programs: Programs, active: Array, group: int, slot: int, rows: int, transposed: bool
    ) -> Array:
        """A matrix [programs, rows, depth] in shared memory, where a descriptor says it is."""
        every = programs.full(programs.registers[slot]).reshape(programs.shape)
        descriptors = every[active, 128 * group : 128 * group + 128]
        if (descriptors != descriptors[:, :1]).any():
            programs.fail(self.by, "a descriptor differs between threads")
        found = np.zeros((len(active), rows, self.depth), np.float32)
        for descriptor in np.unique(descriptors[:, 0]):
            these = np.flatnonzero(descriptors[:, 0] == descriptor)
            address = self._addresses(int(descriptor), rows, transposed)
            raw = programs.shared.operand(self.by, active[these], group, address)
            values = _numbers(raw, self.kind)
            if transposed:
                values = values.swapaxes(2, 3)
            found[these] = values.reshape(len(these), rows, self.depth)
        return found

    def _addresses(self, descriptor: int, rows: int, transposed: bool) -> Array:
        """Addresses of pieces: [rows, depth / core], or [rows / core, depth] if transposed."""
        start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
        if (descriptor >> 49) & 7 or not descriptor >> 62:
            raise Unsupported(f"a base offset, or no swizzle, in a descriptor of {self.by.text}")
        item, swizzle = 4 if self.kind == "tf32" else 2, SWIZZLES[descriptor >> 62]
        core = PIECE // item  # elements of a row of a core matrix, which has eight
        r = np.arange(0, rows, core if transposed else 1)[:, None]
        k = np.arange(0, self.depth, 1 if transposed else core)[None, :]
        place = r // 8 * stride + r % 8 * swizzle + k * item
        if transposed:
            span = swizzle // item
            place = r // span * leading + k // 8 * stride + k % 8 * swizzle + r % span * item
        address = start + place
        return np.asarray(address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4))
