"""Keys that were renamed: old runs and logs stay readable; elsewhere an old key is an error."""

from typing import Any, NamedTuple

import yaml


class Renamed(NamedTuple):
    """The present form of an old key."""

    key: str
    values: tuple[tuple[Any, str], ...] = ()  # (old value, new value); any other is unchanged

    def value(self, old: Any) -> Any:
        """The present form of an old value."""
        return next((new for value, new in self.values if value == old), old)


RENAMED = {
    "classes.head": Renamed("classes.shortlist"),
    "model.tied": Renamed("word_table.tied"),
    "model.input": Renamed("model.input_embedding", (("path", "path_sum"),)),
    "model.input_backoff": Renamed("model.count_word_dropout"),
    "output.dtype": Renamed("word_table.dtype"),
    "output.sparse": Renamed(
        "word_table.gradients", ((None, "auto"), (True, "row_wise"), (False, "dense"))
    ),
    "optim.table": Renamed("word_table.optimizer"),
    "optim.table_lr": Renamed("word_table.lr"),
}
"""Old key → present key."""


def translate_description(values: dict[str, Any]) -> dict[str, Any]:
    """A copy of an old `config.yaml` or `model.json` in which every old key is replaced."""
    values = {
        name: dict(section) if isinstance(section, dict) else section
        for name, section in values.items()
    }
    for name in find_renamed(values):
        section, key = name.split(".")
        new_section, new_key = RENAMED[name].key.split(".")
        old = values[section].pop(key)
        values.setdefault(new_section, {})[new_key] = RENAMED[name].value(old)
    return values


def find_renamed(values: dict[str, Any]) -> list[str]:
    """The old keys, `section.key`, among sections of plain values."""
    return [
        f"{name}.{key}"
        for name, section in values.items()
        if isinstance(section, dict)
        for key in section
        if f"{name}.{key}" in RENAMED
    ]


def translate_override(override: str) -> str:
    """The present form of an override of an old log, with or without dashes."""
    name, _, text = override.partition("=")
    key = name.removeprefix("--")
    if key not in RENAMED:
        return override
    new = RENAMED[key].value(yaml.safe_load(text))
    dashes = name.removesuffix(key)
    return f"{dashes}{RENAMED[key].key}={new if isinstance(new, str) else text}"
