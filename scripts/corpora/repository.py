"""Corpora of source code, as text of words.

`scripts/make_corpus code SOURCE… --out DIR` writes train.txt, valid.txt and test.txt.

A source is a folder, or a tar archive, which may be compressed. Its files of source code are those
with the suffixes of --suffixes, in the order of their names, those of a folder before those of its
folders (in an archive, in its order). Files with a NUL byte, or that are not UTF-8, are left out;
files of equal content are taken once, and links are not followed. A file belongs to one split as a
whole, by the hash of its path in its source.

A line of a file is a line of text, without empty ones. Its words are, the longest first:

  - names: letters, digits, underscores and all characters beyond ASCII, no digit first;
  - numbers: a digit, then letters, digits, underscores, and points before a digit;
  - operators of several characters, such as -> and <<=;
  - other characters of ASCII but white space, each alone.

Comments and strings are text like any other. White space separates words and is not kept.
"""

import argparse
import os
import re
import tarfile
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from data_prep.corpus.lines import SPLITS
from data_prep.errors import DataError, UserError
from data_prep.storage import new_folder
from scripts import run

SUFFIXES = (
    "ada adb ads asm c cc cpp cs cxx d dart el erl ex f f90 go h hh hpp hs hxx inc inl java jl js"
    " jsx kt kts lisp lua m mjs ml mli mm pas php pl pm proto py r rb rs s scala scm sh sql swift"
    " td tcl ts tsx v vala vb vhd zig"
)
"""Suffixes of files of source code, in lower case."""
WORD = re.compile(
    rb"[A-Za-z_\x80-\xff][\w\x80-\xff]*"
    rb"|\d\w*(?:\.\d\w*)*"
    rb"|<<=|>>=|\*\*=|===|!==|\.\.\.|->|=>|::|\+\+|--|&&|\|\||<<|>>|//|/\*|\*/|\*\*|\.\."
    rb"|[-+*/%&|^=!<>:]="
    rb"|[!-~]|\n"
)
"""A word of source code, or the end of a line."""
LINE_ENDS = re.compile(rb" ?\n[ \n]*")
SMALLEST = 1e-6
"""The smallest share of a split."""


def code_text(content: bytes) -> bytes:
    r"""The lines of a file, with spaces between words, and a newline after each line.

    >>> code_text(b"if (x->next_1 >= 0x1F)\n\n\treturn 1.5e3; // no")
    b'if ( x -> next_1 >= 0x1F )\nreturn 1.5e3 ; // no\n'
    """
    words = WORD.findall(content.removeprefix(BOM_UTF8))
    text = LINE_ENDS.sub(b"\n", b" ".join(words)).strip(b" \n")
    return text and text + b"\n"


def split_of(path: bytes, held_out: float) -> str:
    """The split of a file: `valid` and `test` each have the share `held_out` of all paths.

    >>> [split_of(b"src/%d.c" % i, 0.2) for i in range(4)]
    ['train', 'valid', 'test', 'valid']
    """
    share = int.from_bytes(blake2b(path, digest_size=8).digest(), "big") / 2**64
    return "test" if share < held_out else "valid" if share < 2 * held_out else "train"


class _Member(tarfile.TarInfo):
    """A member of an archive that ends with its mark; `tarfile` takes bad headers for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(str(error)) from error


def _refuse(error: OSError) -> NoReturn:
    raise error


def source_files(source: Path, suffixes: frozenset[str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield path and content of the files of a folder or tar archive with one of the suffixes.

    UserError if the source or a file cannot be read, or the source is neither.
    """

    def is_code(path: str) -> bool:
        return os.path.splitext(path)[1][1:].lower() in suffixes

    try:
        if source.is_dir():
            for folder, folders, names in os.walk(source, onerror=_refuse):
                folders.sort()
                paths = [os.path.join(folder, name) for name in sorted(names) if is_code(name)]
                for path in paths:
                    if os.path.isfile(path) and not os.path.islink(path):
                        inner = os.fsencode(os.path.relpath(path, source))
                        yield inner, Path(path).read_bytes()
            return
        with tarfile.open(source, "r|*", tarinfo=_Member) as archive:
            for member in archive:
                if member.isreg() and is_code(member.name):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield os.fsencode(member.name), file.read()
    except OSError as error:
        raise DataError(f"{error.filename or source}: {error.strerror or error}") from error
    except (tarfile.TarError, EOFError) as error:
        expected = "expected a folder or a tar archive that is complete"
        raise DataError(f"{source}: {expected}: {error}") from error


def write_code(options: argparse.Namespace) -> str:
    """Write the three splits of a corpus of source code; returns what it has."""
    if not SMALLEST <= (share := options.held_out) < 0.5:
        raise UserError(f"--held-out: expected at least {SMALLEST}, below 0.5, got {share}")
    suffixes = frozenset(options.suffixes)
    num_files, num_words = (dict.fromkeys(SPLITS, 0) for _ in range(2))
    seen: set[bytes] = set()
    hidden = options.no_progress or None  # None: unless stderr is a terminal
    with new_folder(options.out) as folder, ExitStack() as stack:
        outputs = {s: stack.enter_context(open(folder / f"{s}.txt", "wb")) for s in SPLITS}
        bar = stack.enter_context(tqdm(unit="B", unit_scale=True, disable=hidden))
        for source in options.sources:
            bar.set_description(source.name)
            for path, content in source_files(source, suffixes):
                bar.update(len(content))
                digest = blake2b(content, digest_size=16).digest()
                is_utf8 = content == content.decode(errors="ignore").encode()
                if digest in seen or b"\0" in content or not is_utf8:
                    continue
                seen.add(digest)
                if not (text := code_text(content)):
                    continue
                split = split_of(path, options.held_out)
                outputs[split].write(text)
                num_files[split] += 1
                num_words[split] += text.count(b" ") + text.count(b"\n")
        for split, count in num_files.items():
            if not count:
                total = sum(num_files.values())
                remedy = "give a larger --held-out, or more" if total else "see --suffixes"
                raise UserError(f"{split}.txt has none of {total} files of source code: {remedy}")
    return "; ".join(f"{s}: {num_files[s]:,} files, {num_words[s]:,} words" for s in SPLITS)


def main() -> None:
    """Run the command; raises UserError if an option or a source is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/make_corpus code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="folder or archive")
    share = "share of the files in valid.txt and in test.txt, default 0.01"
    parser.add_argument("--held-out", type=float, default=0.01, metavar="SHARE", help=share)
    listed = "of source code, without the dot; default: " + SUFFIXES
    names = SUFFIXES.split()
    parser.add_argument("--suffixes", nargs="+", default=names, metavar="SUFFIX", help=listed)
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    options = parser.parse_args()
    print(write_code(options))


if __name__ == "__main__":
    run(main, "make_corpus")
