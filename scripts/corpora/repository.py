"""Corpora from source code: its text as words, or the files that its authors change.

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

`scripts/make_corpus git CLONE --out DIR` writes events.parquet: the columns user (hash of an
author's address after .mailmap), item (path of a file) and time (seconds since 1970), one row for
each file that a commit adds or changes, the oldest commit first. Merges are left out, and commits
of more than --max-files files. A hash is a pseudonym: who knows an address can find its rows.
"""

import argparse
import os
import re
import subprocess
import tarfile
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from data_prep.corpus.lines import SPLITS
from data_prep.errors import DataError, UserError
from data_prep.storage import make_folder, new_folder, write_atomically
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


def git_events(clone: Path, max_files: int) -> Iterator[tuple[str, str, int]]:
    """Yield user, item and time of each change of a file, the oldest commit first.

    UserError if git is missing, or does not find a repository or a commit.
    """
    # A commit is "//\0address\0time\0", then, after "\n", a path and "\0" for each file.
    command = ["git", "-c", "log.showRoot=true", "-c", "diff.relative=false", "-C", str(clone)]
    command += ["log", "--reverse", "--no-merges", "--name-only", "-O/dev/null"]
    command += ["--diff-filter=d", "-z", "--format=//%x00%aE%x00%at"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise UserError(f"git cannot be started: {error.strerror}") from error
    if done.returncode:
        problem = done.stderr.decode(errors="replace").strip().splitlines()[-1]
        raise DataError(f"{clone}: {problem}")
    for commit in (b"\0" + done.stdout).split(b"\0//\0")[1:]:
        address, time, names = commit.split(b"\0", 2)
        paths = names.removeprefix(b"\n").rstrip(b"\0").split(b"\0")
        if paths[0] and len(paths) <= max_files:
            user = blake2b(address.lower(), digest_size=8).hexdigest()
            for path in paths:
                yield user, path.decode(errors="backslashreplace"), int(time)


def write_events(options: argparse.Namespace) -> str:
    """Write the table of events of a clone; returns what it has."""
    events = list(git_events(options.clone, options.max_files))
    if not events:
        raise DataError(f"{options.clone}: no commit changes files, or see --max-files")
    users, items, times = zip(*events, strict=True)
    columns = (pyarrow.array(each).dictionary_encode() for each in (users, items))
    table = pyarrow.table([*columns, pyarrow.array(times)], names=["user", "item", "time"])
    make_folder(options.out)
    path = options.out / "events.parquet"
    write_atomically(path, lambda file: parquet.write_table(table, file))
    counts = f"{len(events):,} events, {len({*users}):,} users, {len({*items}):,} items"
    return f"{path}: {counts}"


def main() -> None:
    """Run the command; raises UserError if an option or a source is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/make_corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="code|git")
    code = verbs.add_parser("code", help="text of source code")
    code.set_defaults(write=write_code)
    code.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="folder or archive")
    share = "share of the files in valid.txt and in test.txt, default 0.01"
    code.add_argument("--held-out", type=float, default=0.01, metavar="SHARE", help=share)
    listed = "of source code, without the dot; default: " + SUFFIXES
    names = SUFFIXES.split()
    code.add_argument("--suffixes", nargs="+", default=names, metavar="SUFFIX", help=listed)
    code.add_argument("--no-progress", action="store_true", help="no progress bar")
    git = verbs.add_parser("git", help="files that authors change")
    git.set_defaults(write=write_events)
    git.add_argument("clone", type=Path, metavar="CLONE", help="folder of a git repository")
    most = "commits of more files are left out, default 30"
    git.add_argument("--max-files", type=int, default=30, metavar="N", help=most)
    for verb, what in ((code, "new folder"), (git, "folder, created if missing")):
        verb.add_argument("--out", type=Path, required=True, metavar="DIR", help=what)
    options = parser.parse_args()
    print(options.write(options))


if __name__ == "__main__":
    run(main, "make_corpus")
