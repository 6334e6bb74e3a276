"""The lines of a split, wherever it is: files of text, a dataset on the hub, tables of events."""

from collections.abc import Iterator
from itertools import chain

from data_prep.corpus.formats import reading
from data_prep.corpus.lines import TextFile, column_rows, hub_rows, input_files, split_key
from data_prep.errors import DataError
from data_prep.settings import DataConfig


def read_lines(data: DataConfig, split: str) -> Iterator[str]:
    """Yield the lines of a split in the order of its files, without their line ends.

    UserError if a file is missing, damaged, not UTF-8 or contains a NUL character (names the file
    and the line), or if there is no line at all.
    """
    lines: Iterator[str]
    if data.user_field is not None:
        from data_prep.corpus.events import user_lines  # imports pyarrow

        lines = (line for _, line in user_lines(data, split))
    elif data.hub is None:
        files = input_files(data, split)
        texts = (TextFile(each, data.format, data.text_field) for each in files)
        lines = chain.from_iterable(each.lines() for each in texts)
    else:
        lines = _hub_lines(data, split)
    if not data.keep_empty_lines:
        lines = filter(str.strip, lines)
    first = next(lines, None)
    if first is None:
        paths = input_files(data, split) if data.hub is None else []
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        where = f" ({paths[0]}{more})" if paths else ""
        raise DataError(f"{split_key(data, split)}: the corpus has no line{where}")
    yield first
    yield from lines


def _hub_lines(data: DataConfig, split: str) -> Iterator[str]:
    name = split_key(data, split)
    with reading(name):
        rows = column_rows(hub_rows(data, split), data.text_field, name, (None,))
        yield from chain.from_iterable(rows)
