"""The generated reference: every key with type, default and meaning."""

import pytest

from lm.config import Config, to_dict
from lm.config.reference import describe_keys, sections


def test_every_key_has_a_meaning_and_the_default_of_the_configuration() -> None:
    for section, (meaning, keys) in sections().items():
        assert meaning.endswith(".")
        for key in keys:
            assert key.meaning.endswith("."), key.name
            if key.name == "name":
                continue
            value = to_dict(Config(name="run"))
            for part in key.name.split("."):
                value = value[part]
            assert key.name.startswith(section)
            assert str(value).lower().replace("none", "null") == key.default.lower(), key.name


@pytest.mark.parametrize(
    ("name", "first", "num_keys"),
    [
        ("seed", "seed: int ≥ 0, < 9223372036854775808 = 1", 1),
        ("name", "name: str (required)", 1),
        ("model.dropout", "model.dropout: float ≥ 0, < 1 = 0.0", 1),
        ("optim.betas", "optim.betas: tuple of float ≥ 0, < 1 = [0.9, 0.95]", 1),
        ("train.devices", "train.devices: int > 0 | auto | null = null", 1),
        ("data.files", "data.files.train: str | list of str | null = null", 3),
        ("log", "[log] What is logged while training. metrics.csv is always written.", 3),
    ],
)
def test_a_key_or_section_is_described(name: str, first: str, num_keys: int) -> None:
    lines = describe_keys(name).splitlines()
    assert lines[0] == first
    assert sum(line.startswith(name) for line in lines) == num_keys
    assert max(map(len, lines)) <= 100
