"""The reference of all configuration keys, generated from their documentation."""

import ast
import inspect
import json
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from data_prep.errors import UserError
from lm.config.load import nearest
from lm.config.schema import Config

USUAL_KEYS = (
    *("name", "data.files.train", "data.files.valid", "data.files.test", "tokenizer.kind"),
    *("tokenizer.vocab_size", "model.backbone", "model.hidden", "model.layers", "model.dropout"),
    *("output.tree", "optim.optimizer", "optim.lr", "optim.schedule", "train.max_epochs"),
    *("train.max_steps", "train.max_minutes", "train.batch_size", "train.seq_len"),
    *("train.precision", "train.accelerator", "train.devices", "train.threads"),
)
"""Keys that the short help lists."""
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_WIDTH = 100


class Key(NamedTuple):
    """A key of the configuration."""

    name: str  # section.key
    type: str  # with its bounds, or its choices
    default: str  # in YAML; empty if the key is required
    meaning: str

    @property
    def head(self) -> str:
        """Name, type and default."""
        default = f" = {self.default}" if self.default else " (required)"
        return f"{self.name}: {self.type}{default}"


def sections() -> dict[str, tuple[str, list[Key]]]:
    """Section → (its meaning, its keys); the keys outside all sections have the name ""."""
    keys = _keys("", Config)
    found = {"": (str(Config.__doc__), [key for key in keys if "." not in key.name])}
    for section in fields(Config):
        if is_dataclass(section.type):
            inside = [key for key in keys if key.name.startswith(f"{section.name}.")]
            found[section.name] = (str(section.type.__doc__), inside)
    return found


def describe_keys(name: str | None = None) -> str:
    """The reference of a section or key, by default of everything, as lines of text."""
    blocks = []
    for section, (meaning, keys) in sections().items():
        if section and name in (None, section):
            blocks.append(textwrap.fill(f"[{section}] {meaning}", _WIDTH))
        for key in keys:
            if name is None or f"{key.name}.".startswith(f"{name}."):
                meaning = textwrap.indent(textwrap.fill(key.meaning, _WIDTH - 4), "    ")
                blocks.append(f"{key.head}\n{meaning}")
    if not blocks:
        known = [key.name for _, keys in sections().values() for key in keys]
        raise UserError(
            f"unknown key {name}" + nearest(str(name), [*known, *filter(None, sections())])
        )
    return "\n\n".join(blocks) if name is None else "\n".join(blocks)


def describe_usual_keys() -> str:
    """A line for each of `USUAL_KEYS`, and where the others are."""
    keys = {key.name: key for _, group in sections().values() for key in group}
    lines = [f"  {textwrap.shorten(keys[name].head, _WIDTH)}" for name in USUAL_KEYS]
    title, more = "usual keys of the configuration:", "all keys with their meaning: lm config [KEY]"
    return "\n".join([title, *lines, f"{more}, configs/README.md"])


def _keys(prefix: str, section: Any) -> list[Key]:
    found: list[Key] = []
    meanings = _meanings(section)
    for field in fields(section):
        name = f"{prefix}.{field.name}".lstrip(".")
        if not is_dataclass(field.type):
            required = field.default is MISSING
            default = "" if required else json.dumps(field.default).strip('"')
            found.append(Key(name, _type(field.type), default, meanings[field.name]))
        else:
            found += _keys(name, field.type)
    return found


def _meanings(section: Any) -> dict[str, str]:
    """The docstrings below the fields of a dataclass."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        entry.target.id: " ".join(str(doc.value.value).split())
        for entry, doc in pairwise(definition.body)
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def _type(annotation: Any) -> str:
    """A type as a reader of a YAML file knows it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [
            f"{symbol} {getattr(limit, name)}"
            for constraint in parts[1:]
            for limit in getattr(constraint, "metadata", ())
            for name, symbol in _BOUNDS.items()
            if hasattr(limit, name)
        ]
        return f"{_type(parts[0])} {', '.join(limits)}".strip()
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(_type, parts))
    if origin in (list, tuple):
        return f"{origin.__name__} of {_type(parts[0])}"
    return "null" if annotation is NoneType else str(annotation.__name__)
