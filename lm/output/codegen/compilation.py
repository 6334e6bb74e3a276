"""How functions are compiled, and where the compiled code is kept."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

FOLDER = Path(__file__).parent
STAMP = hashlib.sha256(
    b"".join(
        file.read_bytes()
        for file in sorted([*FOLDER.glob("*.py"), *FOLDER.parent.rglob("*loops.py")])
    )
).hexdigest()
"""Hash of the files whose code is compiled into functions of other files."""


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Let no other process read or write a cache; nothing, where there are no locks."""
    try:
        import fcntl

        file = (Path(folder) / "lock").open("a")
    except (ImportError, OSError):
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Files(IndexDataCacheFile):
    """numba's files, which it writes one after the other, so that processes could mix them up."""

    def load(self, key: object) -> Any:
        """The code of a key, or None."""
        with _locked(self._cache_path):
            return super().load(key)

    def save(self, key: object, data: object) -> None:
        """Write the code of a key."""
        with _locked(self._cache_path):
            super().save(key, data)


class _Cache(FunctionCache):
    """numba's cache of a function on disk, which notices changes to `STAMP`'s files and its own.

    A file that is damaged, or a full disk's, counts as none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp(), STAMP
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, *key: object) -> Any:
        """Compiled code, or None."""
        try:
            return super().load_overload(*key)
        except Exception:  # any, by what damaged bytes are unpickled to
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, *code: object) -> None:
        """Keep compiled code, if the disk can."""
        with suppress(OSError):
            super().save_overload(*code)


def compiled(function: Callable[..., Any]) -> Any:
    """Decorator: numba compiles a function when it is first called; it does not hold Python's lock.

    The code is kept on disk, unless no folder for it can be written.
    """
    made: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # numba finds no folder
        made._cache = _Cache(function)
    return made


def emitted(code: Callable[..., Any], *, returns: bool = False) -> Any:
    """Decorator: make a function that emits LLVM instructions one that compiled loops call.

    `code` is called with LLVM's builder and what is known of each argument while a loop is
    compiled: the dtype of an array, the value of a number, those of a tuple, or None. If the
    function `returns` a number, it has the dtype of the first argument, an array.
    """

    @intrinsic
    @wraps(code)
    def typed(typing: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            known = (_known(builder, *each) for each in zip(kinds, values, strict=True))
            result = code(builder, *known)
            return result if returns else context.get_dummy_value()

        return (kinds[0].dtype if returns else types.void)(*kinds), generate

    return typed


def _known(builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        return kind.dtype
    if isinstance(kind, types.BaseTuple):
        return [builder.extract_value(value, i) for i in range(len(kind))]
    return None if isinstance(kind, types.NoneType) else value
