"""Tables of events, each of a user, an item and a time, as lines: a user's items in order."""

import logging
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from numpy.typing import NDArray

from data_prep.corpus.event_table import as_times, read_table
from data_prep.corpus.formats import reading
from data_prep.corpus.lines import NO_VALUE, SPLITS, input_files, log_once
from data_prep.errors import UserError
from data_prep.sequences import RARE_REPEATS, Ints, item_word, word_item
from data_prep.settings import DataConfig, SplitFiles

SHARES = {"valid_from": 0.8, "test_from": 0.9}
"""Default shares of the events before each limit of a split by time."""
FAR, RECENT = 30, 1e8
"""Consecutive times of this ratio, the later one possible since 1970, have not the same unit."""
ROUNDED = 1 << 27
"""Greater times, as seconds since 1970 are, are multiples of 16 or more as floats of 32 bits."""
_held: dict[object, "_Events"] = {}
"""The table of the last split that was read, for the next one."""
_log = logging.getLogger("data_prep")


class _Events(NamedTuple):
    """All events, user by user in the order of their first rows, each user's in that of time."""

    source: str  # the files, for messages
    names: list[str]  # [U]
    words: NDArray[Any]  # [I] str
    item: Ints  # [n]
    begin: Ints  # [U], the first event of each user
    end: Ints  # [U]
    user: Ints  # [n]
    time: NDArray[Any]  # [n], integers, floats or dates in µs or ns


class EventCounts(NamedTuple):
    """Numbers of a table of events."""

    events: int
    users: int
    items: int
    short: int  # users with fewer than three events
    held_out: int  # items that no event of training has


def count_events(data: DataConfig) -> EventCounts:
    """Count the events of the training files; raises UserError as `user_lines`."""
    events = _read(data, "train", warn=True)
    _, end = _cuts(events, data)["train"]
    num_trained = len(np.unique(events.item[np.arange(len(events.item)) < end[events.user]]))
    num_short = int((events.end - events.begin < 3).sum())
    counts = len(events.item), len(events.begin), len(events.words)
    return EventCounts(*counts, num_short, counts[2] - num_trained)


def histories(data: DataConfig, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the users of a table with the columns of `data`, and their items; as `user_lines`."""
    given = replace(data, dir=".", files=SplitFiles(train=path), split="files")
    events = _read(given, "train")
    for name, begin, end in zip(events.names, events.begin, events.end, strict=True):
        yield name, list(map(word_item, events.words[events.item[begin:end]]))


def user_lines(data: DataConfig, split: str) -> Iterator[tuple[str, str]]:
    """Yield each user with items to predict, and their line: those known, if any, and a tab first.

    UserError if a file cannot be read or lacks a column, or a value is missing or of another type
    than text, integer or, of the time, number or date.
    """
    events = _read(data, split, warn=split == "train" or data.split == "files")
    words, num_events = events.words, events.end - events.begin
    if data.split == "leave_one_out" and split == "valid" and (num_events < 3).any():
        text = "%d of %d users have fewer than three events and are in training alone"
        _log.info(text, (num_events < 3).sum(), len(num_events))
    to_predict, ends = _cuts(events, data)[split]
    if data.split == "files":
        to_predict = to_predict + _num_known(events, data, split)
    cuts = [each.tolist() for each in (events.begin, to_predict, ends)]
    for name, first, cut, last in zip(events.names, *cuts, strict=True):
        if cut < last:
            parts = [" ".join(words[events.item[a:b]]) for a, b in ((first, cut), (cut, last))]
            has_known = split != "train" and data.split != "files"
            yield name, "\t".join(parts) if has_known or first < cut else parts[1]


def _num_known(events: _Events, data: DataConfig, split: str) -> Ints:
    """Events of each user [U] up to the last one that the files of an earlier split have too.

    With times, it is one of the same user, item and time. Without, all of the user's events there
    have to be the first ones here. The log has the numbers.
    """
    known = np.zeros(len(events.begin), np.int64)
    for other in SPLITS[: SPLITS.index(split)]:
        if not getattr(data.files, other):
            continue
        earlier, key = _read(data, other), f"data.files.{other}"
        user, item = (
            np.array([place.get(each, -1) for each in mine], np.int64)
            for mine, place in (
                (events.names, {each: place for place, each in enumerate(earlier.names)}),
                (events.words, {each: place for place, each in enumerate(earlier.words)}),
            )
        )
        columns = [(user[events.user], earlier.user), (item[events.item], earlier.item)]
        is_shared = _are_in(columns)
        if data.time_field is None:
            is_same = _continued(events, earlier, user, columns[1])
        elif (events.time.dtype.kind == "M") != (earlier.time.dtype.kind == "M"):
            problem = "the times of one are dates, those of the other numbers"
            raise UserError(f"data.files.{split} and {key}: {problem}")
        else:
            is_same = _are_in([*columns, (events.time, earlier.time)])
        num_known, same = np.zeros_like(known), np.flatnonzero(is_same)
        np.maximum.at(num_known, events.user[same], same + 1 - events.begin[events.user[same]])
        if num_users := int((num_known > 0).sum()):
            text = f"{num_known.sum():,} events of {num_users:,} users are known from {key}"
            log_once(f"{split}: {text}: they are not predicted")
        is_other = (user >= 0) & (num_known == 0)
        if num_users := int(is_other.sum()):
            text = f"{num_users:,} of {len(user):,} users are in {key} too"
            log_once(f"{split}: {text}: what they did there is not known here")
        if data.time_field is None and (doubled := int((is_shared & is_other[events.user]).sum())):
            text = f"{doubled:,} events of them have the user and item of one in {key}"
            log_once(f"{split}: {text}: they are predicted, remove those that are the same")
        known = np.maximum(known, num_known)
    return known


def _are_in(columns: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Any:
    """Whether each row of some columns [n] is one of the others' rows."""
    keys = np.zeros(sum(map(len, columns[0])), np.int64)
    for column in map(np.concatenate, columns):
        _, values = np.unique(column, return_inverse=True)
        _, keys = np.unique(keys * len(keys) + values, return_inverse=True)
    size = len(columns[0][0])
    return np.isin(keys[:size], keys[size:])


def _continued(events: _Events, others: _Events, user: Ints, items: tuple[Ints, Ints]) -> Any:
    """Whether each event [n] is one of those of all of its user's others, if it begins with these.

    `user` [U] has the place among the others, or -1; `items`, the items of both, by others' places.
    """
    found = np.zeros(len(events.item), bool)
    for mine in np.flatnonzero(user >= 0).tolist():
        theirs = items[1][others.begin[user[mine]] : others.end[user[mine]]]
        rows = slice(events.begin[mine], min(events.begin[mine] + len(theirs), events.end[mine]))
        found[rows] = np.array_equal(items[0][rows], theirs)
    return found


def _cuts(events: _Events, data: DataConfig) -> dict[str, tuple[Ints, Ints]]:
    """The first event to predict and the end of each user [U], by split."""
    begin, end = events.begin, events.end
    if data.split == "files":
        return dict.fromkeys(SPLITS, (begin, end))
    if data.split == "leave_one_out":
        is_long = end - begin >= 3
        valid, test = end - 2 * is_long, end - is_long
        problem = "no user has three events, of which the last two are held out"
    else:
        limits = [_limit(events, name, data) for name in SHARES]
        num_before = [events.user[events.time < limit] for limit in limits]
        valid, test = (begin + np.bincount(each, minlength=len(begin)) for each in num_before)
        times = map(_shown, (*limits, events.time.min(), events.time.max()))
        problem = "data.valid_from {} and data.test_from {} leave a split empty: times are {} to {}"
        problem = problem.format(*times)
    cuts = [*pairwise((begin, valid, test, end))]
    if not all((cut < last).any() for cut, last in cuts):
        raise UserError(f"{events.source}: {problem}")
    return dict(zip(SPLITS, cuts, strict=True))


def _limit(events: _Events, name: str, data: DataConfig) -> Any:
    """The time that a split by time is cut at."""
    given, key = getattr(data, name), f"data.{name}"
    if given is None:
        return np.quantile(events.time, SHARES[name], method="higher")
    limit = as_times(pyarrow.chunked_array([[given]]), key).to_numpy()[0]
    if (is_date := limit.dtype.kind == "M") != (events.time.dtype.kind == "M"):
        expected, found = ("number", "date") if is_date else ("date", "number")
        raise UserError(f"{key}: expected a {expected}, as data.time_field has, got a {found}")
    return limit


def _shown(time: Any) -> str:
    """A time for a message, to the second."""
    return str(time.astype("M8[s]")) if time.dtype.kind == "M" else f"{time:.15g}"


def _read(data: DataConfig, split: str, *, warn: bool = False) -> _Events:
    """The events of the files of a split; one table of all splits is read for the first of them."""
    paths = input_files(data, split)
    stats = [path.stat() for path in paths]
    key = repr(data), *paths, *((each.st_size, each.st_mtime_ns) for each in stats)
    events = _held.pop(key, None) or _sorted(data, split, paths)
    _held.clear()
    if data.split != "files" and split != SPLITS[-1]:
        _held[key] = events
    if warn:
        _warn(events, data)
    return events


def _sorted(data: DataConfig, split: str, paths: Sequence[Path]) -> _Events:
    """Read and sort events, equal times in the order of `data.ties`."""
    tables = [read_table(path, data) for path in paths]
    with reading(f"data.files.{split}"):
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    if not len(table):  # of parquet; other files may have some
        raise UserError(f"{paths[0]}: the table has no row")
    user, item = (table[name].combine_chunks().dictionary_encode() for name in ("user", "item"))
    users, items = (each.indices.to_numpy().astype(np.int64) for each in (user, item))
    names, all_items = user.dictionary.to_pylist(), item.dictionary.to_pylist()
    times = np.zeros(len(users)) if data.time_field is None else table["time"].to_numpy()
    order = np.lexsort((times, users))  # stable
    if data.time_field is not None and data.ties == "random":
        is_tied = _tied(users[order], times[order])
        tied = order[is_tied]
        bits = _hashes(names)[users[tied]] ^ (times[tied].astype(float) + 0.0).view(np.uint64)
        keys = _hashes(all_items)[items[tied]] * (bits | np.uint64(1)), times[tied], users[tied]
        order[is_tied] = tied[np.lexsort(keys)]
    num_events = np.bincount(users)
    end = np.cumsum(num_events)
    words = np.array(list(map(item_word, all_items)), object)
    source = f"{paths[0]}" + f" and {len(paths) - 1} more" * (len(paths) > 1)
    found = items[order], end - num_events, end, users[order], times[order]
    return _Events(source, names, words, *found)


def _hashes(texts: Sequence[str]) -> NDArray[np.uint64]:
    """BLAKE2b of 64 bits of each text."""
    found = (blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(found), "<u8")


def _equal(*keys: NDArray[Any]) -> Any:
    """Whether each row but the first has the keys of the one before, [n - 1]."""
    return np.all([key[1:] == key[:-1] for key in keys], axis=0)


def _tied(user: Ints, time: NDArray[Any]) -> Any:
    """Whether each row, of those sorted by user and time, has both of another one."""
    return np.append(_equal(user, time), False) | np.append(False, _equal(user, time))


def _warn(events: _Events, data: DataConfig) -> None:
    """Warn of what is probably a mistake in a table, and of times that leave the order open."""
    total = len(events.item)
    for count, problem in _problems(events, data):
        share = f"{count:,} of {total:,} events ({100 * count / total:.3g} %)"
        log_once(f"{events.source}: {share} {problem}")
    for kind, names in (("users", events.names), ("items", map(word_item, events.words))):
        forms = {name: _form(name) for name in names}
        if missing := sorted(NO_VALUE & {*forms}):
            text = f"{kind} {', '.join(missing)}: remove these rows if they have none"
            log_once(f"{events.source}: {text}")
        first = {form: name for name, form in reversed(forms.items())}
        pairs = [(first[form], name) for name, form in forms.items() if first[form] != name]
        if pairs:
            text = "{}: {} that differ from others by {} alone: {:,}, as {!a} and {!a}"
            by = "white space, invisible characters, Unicode form, leading zeros or .0"
            log_once(text.format(events.source, kind, by, len(pairs), *pairs[0]))


def _form(name: str) -> str:
    """What names that probably are of one user or item have in common."""
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
        name = "".join(each for each in name if unicodedata.category(each) != "Cf")
    name = " ".join(name.split())
    number = re.fullmatch(r"0*(\d+?)(?:\.0+)?", name)
    return number[1] if number else name


def _problems(events: _Events, data: DataConfig) -> Iterator[tuple[int, str]]:
    """Numbers of events, and what they have."""
    user, item, time = events.user, events.item, events.time
    if data.time_field is None:
        doubled = int(_equal(user, item).sum())
        if doubled > RARE_REPEATS * len(user):
            yield doubled, "have the user and item of the row before"
        size = events.end - events.begin
        half = size // 2
        first = np.flatnonzero(np.arange(len(user)) - events.begin[user] < half[user])
        is_same = item[first] == item[first + half[user[first]]]
        num_same = np.bincount(user[first[is_same]], minlength=len(half))
        is_twice = (num_same == half) & (2 * half == size) & (size > 2)
        if 2 * is_twice.sum() > len(half):
            text = "repeat all earlier ones of their user: does the table have its rows twice?"
            yield half[is_twice].sum(), text
        return
    times, sizes = np.unique(time, return_counts=True)
    most = sizes.argmax()
    if 2 < len(time) < 2 * sizes[most]:
        yield sizes[most], f"have the time {_shown(times[most])}"
    since = np.maximum(times.astype(float), 1)
    ratio = since[1:] / since[:-1] * (since[1:] >= RECENT)
    if ratio.max(initial=0) > FAR:
        early, late = times[ratio.argmax() :][:2]
        text = f"have times up to {_shown(early)}, the others from {_shown(late)}"
        yield (time <= early).sum(), f"{text}: in another unit (seconds, milliseconds), or no time"
    large = since[since > ROUNDED]
    is_rounded = np.array_equal(large, large.astype(np.float32)) and (large % 60).any()
    if is_rounded and len(large) > 2:
        text = f"have times rounded to multiples of {np.spacing(np.float32(large[-1])):.0f}"
        yield (time >= times[-len(large)]).sum(), f"{text}, as floats of 32 bits are"
    tied = np.flatnonzero(_tied(user, time))
    if len(tied):
        order = tied[np.lexsort((item[tied], time[tied], user[tied]))]
        if doubled := int(_equal(user[order], item[order], time[order]).sum()):
            yield doubled, "repeat another: the same user, item and time"
        what = {"rows": "the order of the rows decides", "random": "a hash decides"}[data.ties]
        other = "; random makes figures independent of it" * (data.ties == "rows")
        text = f"share user and time with another: {what} theirs (data.ties: {data.ties}{other})"
        yield len(tied), text
