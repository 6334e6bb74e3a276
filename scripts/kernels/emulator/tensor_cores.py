"""Matrix products: mma.sync of a warp, and wgmma of a warp group, which is asynchronous."""

import re

import numpy as np

from .access import Array
from .arithmetic import from_halves
from .decoder import Decoder, instruction
from .parser import Instruction, Unsupported
from .programs import Action, Mask, Programs
from .shared_memory import BASE, PIECE

SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}
"""Bytes over which rows of a matrix in shared memory are swizzled, by code of a descriptor."""
TF32 = np.uint32(0xFFFFE000)
"""The bits of an fp32 number that tensor cores read."""


def _numbers(bits: Array, kind: str) -> Array:
    """Words or bytes [..., n] as fp32 [..., elements in them]."""
    if kind == "tf32":
        return (bits.view(np.uint32) & TF32).view(np.float32)
    return from_halves(bits, kind)


def _sizes(by: Instruction) -> tuple[int, int, int]:
    found = re.search(r"\.m(\d+)n(\d+)k(\d+)\.", ".".join(by.fields))
    if found is None:
        raise Unsupported(by.text)
    return int(found[1]), int(found[2]), int(found[3])


def _registers(programs: Programs, slots: list[int], kind: str) -> Array:
    """[warps, registers, 32, elements of a register]."""
    words = [programs.warps(programs.registers[slot])[..., None] for slot in slots]
    return _numbers(np.stack(words, 1), kind)


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
    rows, columns, depth = _sizes(by)
    kind = by.fields[-3]
    if (rows, columns) != (16, 8) or by.fields[-4] != "f32" or by.fields[-1] != "f32":
        raise Unsupported(by.text)
    if kind not in {"bf16", "f16", "tf32"} or by.guard is not None:
        raise Unsupported(by.text)
    targets, left, right, before = [decoder.vector(each, "b32") for each in by.operands]

    def act(programs: Programs, mask: Mask) -> None:
        programs.require_whole_warps(by, mask)
        product = _left(programs, left, kind) @ _right(programs, right, kind)
        programs.num_products += programs.count(mask) // 32 * rows * columns * depth
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
    for products in (programs.reading, programs.writing):
        for name, last in list(products.items()):
            if (last < shared.product_waits[:, 0]).all():
                del products[name]


class _GroupProduct:
    """D = A Bᵀ, or D + A Bᵀ, by the four warps of a group; A from registers or shared memory.

    The result is computed at once. Until it has been waited for, registers that it reads may not be
    written, registers that it writes may not be used, and shared memory that it reads is pinned.
    """

    def __init__(self, decoder: Decoder, by: Instruction) -> None:
        self.by, self.kind = by, by.fields[-1]
        self.rows, self.columns, self.depth = _sizes(by)
        targets, left, right, keep, *flags = by.operands
        known = self.kind in {"bf16", "f16", "tf32"} and by.has("f32")
        if not known or flags[:2] != ["1", "1"] or by.guard:
            raise Unsupported(by.text)
        self.from_registers = left.startswith("{")
        self.targets = decoder.vector(targets, "b32")
        self.left = decoder.vector(left, "b32" if self.from_registers else "b64")
        self.right, self.keep = decoder.source(right, "b64"), decoder.source(keep, "pred")
        transposed = [flag == "1" for flag in flags[2:]]
        expected = 0 if self.kind == "tf32" else 1 if self.from_registers else 2
        if len(transposed) != expected:
            raise Unsupported(by.text)
        self.left_transposed = transposed[0] if len(transposed) == 2 else False
        self.right_transposed = transposed[-1] if transposed else False
        self.written = re.findall(r"%\w+", targets)
        self.read = re.findall(r"%\w+", left) if self.from_registers else []

    def __call__(self, programs: Programs, mask: Mask) -> None:
        active = programs.rows(self.by, mask)
        num_groups = programs.shape[1] // 128
        products = np.zeros((len(active), num_groups, 64, self.columns), np.float32)
        for group in range(num_groups):
            products[:, group] = self._product(programs, active, group)
        programs.num_products += products.size * self.depth
        parts = products.reshape(len(active), -1, 2, 8, self.columns // 8, 4, 2)
        parts = parts.transpose(4, 2, 6, 0, 1, 3, 5)  # [columns / 8, 2, 2, programs, warps, 8, 4]
        keep = programs.full(programs.registers[self.keep]).reshape(programs.shape)[active]
        for i, slot in enumerate(self.targets):
            part = parts[i // 4, i % 4 // 2, i % 2].reshape(len(active), -1)
            held = programs.registers[slot]
            old = np.broadcast_to(np.uint32(0) if held is None else held, programs.shape)
            total = np.where(keep, old[active].view(np.float32) + part, part)
            new = old.copy()
            new[active] = total.view(np.uint32)
            programs.registers[slot] = new
        self._mark(programs, active)

    def _mark(self, programs: Programs, active: Array) -> None:
        """Note the commit that the registers wait for, by program; -1 for none."""
        commits = programs.shared.product_commits[:, 0]
        for products, names in ((programs.reading, self.read), (programs.writing, self.written)):
            for name in names:
                last = products.get(name, np.full(programs.shape[0], -1, np.int32)).copy()
                last[active] = commits[active]
                products[name] = last

    def _product(self, programs: Programs, active: Array, group: int) -> Array:
        """[programs, 64, columns]."""
        right = self._shared(
            programs, active, group, self.right, self.columns, self.right_transposed
        )
        if not self.from_registers:
            (slot,) = self.left
            left = self._shared(programs, active, group, slot, 64, self.left_transposed)
            return left @ right.swapaxes(1, 2)
        warps = _left(programs, self.left, self.kind).reshape(programs.shape[0], -1, 64, self.depth)
        return np.asarray(warps[active, group] @ right.swapaxes(1, 2))

    def _shared(
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
        if (descriptor >> 49) & 7:
            raise Unsupported(f"base offset of a descriptor in {self.by.text}")
        item, swizzle = 4 if self.kind == "tf32" else 2, SWIZZLES[descriptor >> 62]
        core = PIECE // item  # elements of a row of a core matrix, which has eight
        r = np.arange(0, rows, core if transposed else 1)[:, None]
        k = np.arange(0, self.depth, 1 if transposed else core)[None, :]
        if transposed and swizzle > 16:
            span = swizzle // item
            place = r // span * leading + k // 8 * stride + k % 8 * swizzle + r % span * item
        elif transposed:
            place = r // core * stride + k // 8 * leading + k % 8 * 16 + r % core * item
        elif swizzle > 16:
            place = r // 8 * stride + r % 8 * swizzle + k * item
        else:
            place = r // 8 * stride + k // core * leading + r % 8 * 16 + k % core * item
        address = start + place
        return np.asarray(address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4))


assert BASE % 1024 == 0  # swizzles repeat after 1024 bytes
