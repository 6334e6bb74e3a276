"""Reading, validating and writing configurations; a mistake is one line that names the key."""

import difflib
import json
import os
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from data_prep.corpus.formats import likely_encoding, no_text
from data_prep.corpus.lines import input_files
from data_prep.errors import DataError, UserError
from lm.config.rules import first_problem, keys_without_effect
from lm.config.schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply overrides `--section.key=value` in YAML, of which later ones win.

    Where a key is text, so is a number or a date: `name: 007`, `--name=2024-05-01`.

    Raises:
        UserError: if the file cannot be read or is not YAML, if a key is unknown (the message names
            the nearest valid one) or given twice, if a value has the wrong type or is out
            of range, if keys are in conflict, or if one has no effect with the others (it may
            have none in a file where an override is the reason). The message names the file and
            the key.
    """
    values = _read_values(path)
    config = _overridden(values, overrides, str(path))
    _check_effects(config, _flatten(values), overrides, str(path))
    return config


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """A configuration with overrides, which may leave other keys without effect.

    Errors are otherwise those of `load_config`.
    """
    return _overridden(to_dict(config), overrides, config.name)


def _overridden(values: dict[str, Any], overrides: Sequence[str], source: str) -> Config:
    """The configuration of values, changed in place by overrides."""
    given = dict(override.removeprefix("--").partition("=")[::2] for override in overrides)
    for override in (*_implied(given), *overrides):
        _apply(values, override)
    return validate(values, source, overrides)


def _check_effects(
    config: Config, given: Collection[str], overrides: Sequence[str], source: str
) -> None:
    """UserError if a given key, of a file or an override, has a value without effect."""
    changes: dict[str, Any] = {}
    for override in overrides:
        _apply(changes, override)
    chosen, values = _flatten(changes).keys(), _flatten(to_dict(config))
    default = _flatten(to_dict(Config(name=config.name)))
    of_file, of_overrides = keys_without_effect(values, chosen), keys_without_effect(values)
    for key in values:
        unmet = of_overrides if key in chosen else of_file if key in given else {}
        if key in unmet and values[key] != default[key]:
            raise UserError(f"{source}: {key} requires {unmet[key]}")


def _read_values(path: str | Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    try:
        content = Path(path).read_bytes()
        problem = no_text(content, str(path), "expected YAML")
        reason = problem and f"it is {problem}"
        text = "" if reason else content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"invalid UTF-8: {likely_encoding(content)}"
    if reason is not None:
        raise UserError(f"{path}: cannot read the configuration: {reason}")
    values = _parse(text, str(path), Config)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected sections with keys, got {type(values).__name__}")
    return values


_LOCATING = ("--data.dir", "--data.files", "--data.hub")
"""Overrides that say where a text is."""


def load_run_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """`load_config` of the run in a folder, which becomes `run_dir`.

    An override of `run_dir` is obeyed; one of `name` is that of another folder next to it. Keys of
    the run that have no effect are no mistake. A text that is only where the run was started is
    found by `data.dir`.
    """
    if folder.is_dir() and not (folder / "config.yaml").exists():
        first = f"lm train CONFIG begins one, for instance lm train {folder.name}.yaml"
        raise UserError(f"{folder}: no run here (config.yaml is missing): {first}")
    path = folder / "config.yaml"
    values = _read_values(path)
    written = os.path.normpath(str(values.get("run_dir") or f"runs/{values.get('name')}"))
    config = _overridden(values, overrides, str(path))
    _check_effects(config, (), overrides, str(path))
    keys = {override.partition("=")[0] for override in overrides}
    if not any(key == "--data" or key.startswith(_LOCATING) for key in keys):
        started = (os.path.abspath(folder), str(folder.resolve()))  # `runs` may be a link
        starts = (Path(place.removesuffix(f"/{written}")) for place in started)
        for place in (Path(), *starts):
            data = replace(config.data, dir=str(place / config.data.dir))
            with suppress(DataError):
                input_files(data, "train")
                config = replace(config, data=data)
                break
    if "--run_dir" in keys:
        return config
    if "--name" in keys:
        folder = Path(os.path.normpath(folder / ".." / config.name))
    return replace(config, run_dir=str(folder))


def validate(values: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Convert plain values, section → key → value, to a `Config`, without coercion.

    A key that is left out has the only value that the others can be combined with, if there is one:
    `classes.method` is file where `classes.file` is given.

    Errors are those of `load_config`, and name the override of a wrong key, or else `source`.
    """
    try:
        values = json.loads(json.dumps(values))
        flat = _flatten(values)
        for override in _implied(flat):
            if override[2:].partition("=")[0] not in flat:
                _apply(values, override)
        config = _ADAPTER.validate_json(json.dumps(values))
    except ValidationError as error:
        blank = to_dict(Config(name="name"))
        known = sorted({*_flatten(blank), *blank})
        key, message = _first_error(error, known)
        wrong = [o for o in overrides if o[2:].startswith((f"{key}=", f"{key}."))]
        source = wrong[-1] if wrong else source  # of which the last one counts
        raise UserError(f"{source}: {message}") from error
    except TypeError as error:
        raise UserError(f"{source}: a value is neither a number nor text: {error}") from error
    if problem := first_problem(config):
        raise UserError(f"{source}: {problem}")
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Convert a configuration to plain values, defaults included: the inverse of `validate`."""
    values: dict[str, Any] = json.loads(_ADAPTER.dump_json(config))
    return values


def to_yaml(config: Config) -> str:
    """Convert a configuration to the text of a YAML file, defaults included."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


Differences = dict[str, tuple[Any, Any]]
"""`section.key` → (old value, new value)."""


def differences(old: Config, new: Config, free: tuple[str, ...] = ()) -> Differences:
    """Every key that differs and has an effect, but those that begin with one of `free`."""
    before, after = _flatten(to_dict(old)), _flatten(to_dict(new))
    keys = sorted(after.keys() - keys_without_effect(after).keys())
    changed = (key for key in keys if before[key] != after[key] and not key.startswith(free))
    return {key: (before[key], after[key]) for key in changed}


def describe_differences(found: Differences) -> str:
    """Differences on one line, for a message."""
    return ", ".join(f"{key}: {old} → {new}" for key, (old, new) in found.items())


_REMOVED = """classes.head=classes.shortlist, model.input=model.input_embedding,
model.input_backoff=model.count_word_dropout, model.tied=word_table.tied,
output.dtype=word_table.dtype, output.sparse=word_table.gradients,
optim.table=word_table.optimizer, optim.table_lr=word_table.lr, classes.column_cost, output.bias,
classes --plot"""
REMOVED = dict(each.partition("=")[::2] for each in re.split(r",\s", _REMOVED))
"""Keys, and commands with options, of earlier versions, and the keys that have replaced them."""


def nearest(name: str, known: Collection[str], cutoff: float = 0.5, command: str = "") -> str:
    """A hint at what became of an unknown name, or at the known one that is most similar.

    It is empty if there is none. A command is that of an option.
    """
    if known and (old := f"{command} {name}".lstrip()) in REMOVED:
        return f"; it is now {REMOVED[old]}" if REMOVED[old] else "; it is no longer available"
    same_key = [each for each in known if each.split(".")[-1] == name.split(".")[-1]]
    similar = same_key or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {similar[0]}?" if similar else ""


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number; a date, 010 and 1:30 are text; a key given twice is an error.

    Attributes:
        section: dataclass of the values, whose fields of type str are text; None if there is none.
    """

    section: Any = None

    def get_single_node(self) -> yaml.Node | None:
        """The document, in which values of keys that are text are text."""
        node = super().get_single_node()
        _mark_text(node, self.section)
        return node


def _mark_text(node: yaml.Node | None, kind: Any) -> None:
    """Make the values of a node text where their type is text, whatever they look like."""
    if isinstance(node, yaml.MappingNode) and is_dataclass(kind):
        for key, value in node.value:
            _mark_text(value, _field_type(kind, key.value))
    elif isinstance(node, yaml.SequenceNode) and _is_text(kind):
        for value in node.value:
            _mark_text(value, str)
    elif isinstance(node, yaml.ScalarNode) and _is_text(kind) and node.tag in _NUMBERS:
        node.tag = _TAG + "str"


def _field_type(section: Any, name: object) -> Any:
    """The type of a key of a section; None if there is no such key."""
    return next((field.type for field in fields(section) if field.name == name), None)


def _is_text(kind: Any) -> bool:
    """Whether values of a type are text: str, names to choose from, lists of these, or null."""
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return str in (get_args(kind) or (kind,))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    given: list[Any] = []
    for key_node, _ in node.value:
        if key_node.tag != "tag:yaml.org,2002:merge":
            key = loader.construct_object(key_node)
            if key in given:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} given twice", problem_mark=key_node.start_mark
                )
            given.append(key)
    return loader.construct_mapping(node, deep=True)


_TAG = "tag:yaml.org,2002:"
_NUMBERS = {_TAG + name for name in ("int", "float", "bool")}
_RESOLVED = {_TAG + name for name in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] not in _RESOLVED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_FLOAT = (
    r"[-+]?((\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)
for _kind, _pattern in (("int", r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F]+)"), ("float", _FLOAT)):
    _first = list("-+.0123456789")
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^({_pattern})$"), _first)
_ADAPTER = TypeAdapter(Config)
_UNION_BRANCHES = {"str", "list[str]", "int", "float", "constrained-int", "constrained-float"} | {
    "literal['auto']"
}


_IMPLIED = {
    "classes.file": "classes.method=file",
    "classes.depth": "output.tree=multi_level",
    "model.input_tree": "model.input_embedding=path_sum",
    "output.num_samples": "output.tree=full",
    "output.tail_dropout": "output.tree=adaptive",
    "train.shard_by": "train.strategy=shard_output",
}
"""Keys, and the only value of another that they can be combined with."""
_UNSET = {"", "~", "null", "None", "auto", "output", "0", "0.0"}
"""Values of these keys that imply nothing."""


def _implied(given: Mapping[str, Any]) -> list[str]:
    """The overrides that given keys imply."""
    return [f"--{only}" for key, only in _IMPLIED.items() if str(given.get(key)) not in _UNSET]


def _parse(text: str, source: str, section: Any = None) -> Any:
    try:
        loader = _Loader(text)
        loader.section = section
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {_yaml_problem(error)}") from error
    except RecursionError as error:
        raise UserError(f"{source}: not valid YAML: values are nested too deeply") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # of a tag such as !!int
        raise UserError(f"{source}: not valid YAML: a value is not of its type: {error}") from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and in which line, without the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).replace('in "<unicode string>",', "at").split())
    problem = error.problem if error.context is None else f"{error.context}, {error.problem}"
    mark = error.problem_mark or error.context_mark
    return (
        problem if mark is None else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
    )


def _apply(values: dict[str, Any], override: str) -> None:
    """Set the value of one override in place."""
    name, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or not equals or not name:
        raise UserError(f"expected an override --section.key=value, got {override!r}")
    if not text.isascii() and text != text.encode(errors="replace").decode():
        raise UserError(f"--{name}={text!r}: not UTF-8")
    *sections, key = name.split(".")
    kind: Any = Config
    for each in (*sections, key):
        kind = _field_type(kind, each) if is_dataclass(kind) else None
    for section in sections:
        inner = values.get(section)
        values[section] = inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise UserError(f"--{name}: {section} is not a section")
        values = inner
    # Text need not be valid YAML, but may be a quoted string of it, or a list.
    is_list = text.startswith("[") and text.endswith("]")
    is_plain = _is_text(kind) and not (is_list or text.startswith(("'", '"')))
    can_be_null = NoneType in get_args(kind) and text in ("", "~", "null")
    values[key] = text if is_plain and not can_be_null else _parse(text, f"--{name}", kind)


def _first_error(error: ValidationError, known: Sequence[str]) -> tuple[str, str]:
    """The key and a line about the first problem that pydantic found, given the known keys."""
    problem = error.errors()[0]
    key = ".".join(str(step) for step in problem["loc"] if step not in _UNION_BRANCHES)
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return key, f"unknown key {key}" + nearest(key, known)
    if problem["type"] in ("missing", "missing_argument"):
        return key, f"{key} is missing"
    message = " ".join(problem["msg"].split())
    return key, f"{key}: {message}, got {reprlib.repr(problem['input'])}"


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
