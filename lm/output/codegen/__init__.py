"""How a loop becomes code: all that knows numba's compiler and LLVM.

A loop is a function of Python over numpy's arrays, decorated by `compilation.compiled`: numba
compiles it to machine code when it is first called, for the dtypes of its arguments, and keeps the
code on disk. What is kept has a stamp, the hash of this folder's files and of `*loops.py`:
whichever of them changes, all loops are compiled anew.

numba alone makes loops over single numbers of them. Where time is spent, loops call functions that
`compilation.emitted` makes, whose bodies are instructions of LLVM: a function of Python runs while
the loop is compiled, once for the dtypes of its arguments, and emits them. Such a function gets the
builder of LLVM, the dtype of each argument that is an array, and the values, unknown yet, of those
that are numbers or tuples of numbers. Memory is passed as addresses, `array.ctypes.data` plus
bytes, and arrays only for their dtypes. Names mean the same everywhere: `num` is how many numbers a
row has; a tuple (address, stride) has the bytes from a row to the next; `last` is the last row that
there is, which stands for those beyond it.

- `vectors`: operations on vectors as wide as the processor's registers, of fp32, fp64 or pairs of
  bf16 numbers, and loops over a row that mask its last vector.
- `tiles`: products of matrices. A tile of sums stays in registers while vectors are read.
- `row_operations`: softmaxes, exponentials and sums, along rows.
- `sorting`: radix sort and heaps, without instructions of LLVM.

Sums are formed in an order that does not depend on how work is divided among threads. To add an
operation, write a function with `emitted` in the file of its kind; to see what it became, call
`inspect_asm()` of the loop.
"""
