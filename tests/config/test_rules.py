"""Keys that conflict are a single-line error that names them; others follow from one another."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.errors import UserError
from lm.config import WordTable, differences, load_config, load_run_config, validate
from lm.config.word_table import resolve_word_table

MINIMAL = {"name": "run", "train": {"max_steps": 5}}
CONFLICTS = """\
train: {}
train.max_epochs, train.max_steps or train.max_minutes is required
model: {backbone: transformer, hidden: 20, heads: 8}
model.hidden = 20 must be a multiple of 2 × model.heads = 16
{model: {input_embedding: path_sum}, output: {tree: adaptive}, word_table: {tied: true}}
output.tree: adaptive requires model.input_embedding: word, or model.input_tree: two_level, \
word_table.tied: false
{model: {input_embedding: path_sum}, output: {tree: full}}
model.input_embedding: path_sum cannot be combined with output.tree: full, which has no classes: \
set model.input_embedding: word, or model.input_tree: two_level
model: {input_tree: two_level, input_embedding: word}
model.input_tree requires model.input_embedding: path_sum, got word
{model: {input_embedding: path_sum, input_tree: two_level}, output: {tree: full}, \
train: {max_steps: 5, strategy: shard_output}}
model.input_tree: two_level with output.tree: full cannot be combined with train.strategy: \
shard_output
train: {max_steps: 5, keep: ndcg}
train.keep: ndcg requires data.sequences: independent, and neither output.tree: adaptive nor \
train.strategy: shard_output
{output: {tree: adaptive}, train: {max_steps: 5, strategy: shard_output}}
train.strategy: shard_output cannot be combined with output.tree: adaptive
{train: {max_minutes: 0.5}, optim: {schedule: plateau}}
train.max_minutes requires a schedule that ends with the time: set optim.schedule: cosine, got \
plateau
output: {tree: full, tail_dropout: 0.1}
output.tail_dropout requires output.tree: adaptive, got full
output: {tree: two_level, num_samples: 100}
output.num_samples requires output.tree: full, and no train.strategy: shard_output
tokenizer: {kind: sentencepiece}
tokenizer.kind: sentencepiece requires tokenizer.vocab_size
{tokenizer: {kind: sentencepiece, vocab_size: 99}, model: {input_pieces: 8}}
model.input_pieces requires tokenizer.kind: words, got sentencepiece
classes: {method: file}
classes.method: file requires classes.file
{classes: {method: file, file: c.txt}, output: {tree: multi_level}}
output.tree: multi_level requires classes.file_format: brown or taxonomy, got mkcls
{classes: {depth: 4}, output: {tree: two_level}}
classes.depth requires output.tree: multi_level, got two_level
classes: {method: random, file: c.txt}
classes.file requires classes.method: file, got random
classes: {vectors: v.txt}
classes.vectors requires classes.method: embedding and output.tree: two_level, and no \
classes.clustered_words
data: {hub: a/b, files: {valid: v.txt}}
data.hub and data.files exclude each other: omit the files, or set data.hub to null
{train: {max_steps: 5, seq_len: 1}, model: {backbone: transformer, hidden: 16}}
train.seq_len must be at least 2 for a transformer
{train: {max_steps: 5, precision: 64-true}, output: {backend: triton}}
output.backend: triton cannot be combined with train.precision: 64-true
{data: {sequences: independent}, tokenizer: {split_punctuation: true}}
data.sequences: independent requires tokenizer.kind: words and tokenizer.split_punctuation: false
data: {predict_eos: true}
data.user_field and data.predict_eos require data.sequences: independent
data: {sequences: independent, user_field: user}
data.user_field requires data.format: parquet, json or csv, and no data.hub, got text
data: {sequences: independent, split: time}
data.split: time requires data.user_field, and no data.files.valid or data.files.test
data: {sequences: independent, format: csv, user_field: u, split: time, time_field: null}
data.split: time requires data.time_field, got None
data: {sequences: independent, valid_from: '3'}
data.valid_from requires data.split: time, got files
data: {sequences: independent, format: csv, user_field: u, split: time, predict_eos: true}
data.predict_eos requires data.split: files, got time
name: a/b
name must be a plain file name, got 'a/b'
{word_table: {tied: true}, model: {embedding: 8, hidden: 16}}
word_table.tied requires model.embedding = model.hidden = 16, got 8
model: {residual: true, embedding: 8, hidden: 16}
model.residual requires model.embedding = model.hidden = 16, got 8
{word_table: {tied: true}, output: {tree: adaptive}}
output.tree: adaptive requires word_table.tied: false
word_table: {gradients: row_wise}
word_table.gradients: row_wise requires an optimizer that skips rows without a gradient: \
word_table.optimizer, or sgd without momentum and weight_decay
{word_table: {gradients: row_wise, optimizer: sgd}, train: {max_steps: 5, devices: 2}}
row-wise gradients of word_table cannot be combined with train.devices: 2
{word_table: {gradients: row_wise, optimizer: adam}, train: {max_steps: 5, precision: 16-mixed}}
row-wise gradients of word_table cannot be combined with train.precision: 16-mixed
{word_table: {gradients: row_wise, optimizer: sgd}, train: {max_steps: 5, strategy: ddp}}
row-wise gradients of word_table cannot be combined with train.strategy: ddp
{word_table: {gradients: row_wise, optimizer: adagrad}, output: {tree: adaptive}}
row-wise gradients of word_table cannot be combined with output.tree: adaptive
word_table: {dtype: bf16, gradients: dense, optimizer: sgd}
word_table.dtype: bf16 requires row-wise gradients: word_table.optimizer, and \
word_table.gradients: auto or row_wise
{word_table: {dtype: bf16, optimizer: sgd}, train: {max_steps: 5, precision: 64-true}}
word_table.dtype: bf16 cannot be combined with train.precision: 64-true
word_table: {lr: 0.1}
word_table.lr requires word_table.optimizer
model: {backbone: transformer, hidden: 16, dropout_weight: 0.5}
model.dropout_weight requires model.backbone: lstm, got transformer
model: {dropout_variational: true}
model.dropout_variational requires model.dropout: not 0.0, got 0.0
output: {tree: adaptive, backend: reference}
output.backend requires output.tree: not adaptive, got adaptive
{output: {tree: huffman}, classes: {shortlist: 3}}
classes.shortlist requires output.tree: two_level or multi_level, or model.input_tree: two_level, \
got huffman
data: {text_field: body}
data.text_field requires data.format: parquet or json or csv, or data.hub: NAME, got text
data: {sequences: independent, format: csv, user_field: user, keep_empty_lines: false}
data.keep_empty_lines requires data.user_field: null, got user
{train: {max_steps: 5, precision: 16-mixed, skip_nonfinite_steps: 2}}
train.skip_nonfinite_steps requires train.precision: not 16-mixed, got 16-mixed
classes: {method: embedding, vectors: v.txt, dimensions: 30}
classes.dimensions requires classes.vectors: null, got v.txt
classes: {method: random, dimensions: 30}
classes.dimensions requires classes.method: exchange or embedding, got random
optim: {optimizer: sgd, betas: [0.9, 0.9]}
optim.betas requires optim.optimizer: adamw, or word_table.optimizer: adam, got sgd
""".splitlines()
"""Keys on one line, and what is wrong with them on the next."""
PAIRS = list(zip(CONFLICTS[::2], CONFLICTS[1::2], strict=True))


@pytest.mark.parametrize(("keys", "message"), PAIRS)
def test_conflicting_keys_are_an_error(tmp_path: Path, keys: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | yaml.safe_load(keys)))
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {message}"


def test_keys_without_effect_remain_in_runs_and_where_an_override_chooses(tmp_path: Path) -> None:
    path, values = tmp_path / "config.yaml", MINIMAL | {"model": {"heads": 2}}
    path.write_text(yaml.safe_dump(values))
    run, new = load_run_config(tmp_path), validate(MINIMAL, "c")
    assert run.model.heads == 2
    assert list(differences(run, new)) == ["run_dir"]  # a continued run may do without
    path.write_text(yaml.safe_dump(values | {"model": {"heads": 2, "backbone": "transformer"}}))
    assert load_config(path, ["--model.backbone=lstm"]).model.heads == 2
    for read in (load_config, load_run_config):
        for changes in (["--model.heads=4"], ["--model={backbone: lstm, heads: 4}"]):
            with pytest.raises(UserError, match=r"model.heads requires .*, got lstm"):
                read(path if read is load_config else tmp_path, ["--model.backbone=lstm", *changes])


@pytest.mark.parametrize(
    ("key", "value", "other", "only"),
    [
        ("classes.file", "c.txt", "classes.method", "file"),
        ("classes.depth", 4, "output.tree", "multi_level"),
        ("model.input_tree", "two_level", "model.input_embedding", "path_sum"),
        ("output.num_samples", 9, "output.tree", "full"),
        ("output.tail_dropout", 0.1, "output.tree", "adaptive"),
        ("train.shard_by", "word", "train.strategy", "shard_output"),
    ],
)
def test_a_key_with_one_possible_value_is_found(
    tmp_path: Path, key: str, value: str | float, other: str, only: str
) -> None:
    path, (section, name) = tmp_path / "c.yaml", key.split(".")
    other_section, other_name = other.split(".")
    values: dict[str, Any] = deepcopy(MINIMAL)
    default = getattr(getattr(validate(values, "c"), other_section), other_name)
    values.setdefault(section, {})[name] = value
    assert getattr(getattr(validate(values, "c"), other_section), other_name) == only != default
    # An override's is found too, whatever the file says, unless it is given as well.
    values[section].pop(name)
    values.setdefault(other_section, {})[other_name] = default
    path.write_text(yaml.safe_dump(values))
    config = load_config(path, [f"--{key}={value}"])
    assert getattr(getattr(config, other_section), other_name) == only
    with pytest.raises(UserError, match=f"{name}.* requires {other}"):
        load_config(path, [f"--{key}={value}", f"--{other}={default}"])


SGD = {"optimizer": "sgd"}


def resolved(
    num_rows: int = 1 << 14, *, num_devices: int = 1, on_gpu: bool = False, **sections: Any
) -> WordTable:
    """The table of `num_rows` rows of 256 elements."""
    config = validate(MINIMAL | {"model": {"hidden": 256}} | sections, "c")
    return resolve_word_table(config, num_rows, num_devices, on_gpu=on_gpu)


ADAM_IN_BF16 = {"optimizer": "adam", "dtype": "bf16"}
ALL_DEVICES = {"max_steps": 5, "devices": "auto"}


@pytest.mark.parametrize(
    ("row_wise", "num_rows", "sections"),
    [
        (True, 1 << 14, {"optim": SGD}),
        (False, (1 << 14) - 1, {"optim": SGD}),
        (True, 1 << 14, {"word_table": {"optimizer": "adagrad"}}),
        (False, 1 << 14, {"optim": {"optimizer": "adamw"}}),
        (False, 1 << 14, {"optim": SGD | {"momentum": 0.9}}),
        (False, 1 << 14, {"optim": SGD | {"weight_decay": 0.1}}),
        (False, 1 << 14, {"optim": SGD, "output": {"tree": "adaptive"}}),
        (False, 1 << 14, {"optim": SGD, "output": {"tree": "full"}}),  # every row has a gradient
        (False, 1 << 14, {"optim": SGD, "train": {"max_steps": 5, "devices": 2}}),
        (False, 1 << 14, {"optim": SGD, "word_table": {"gradients": "dense"}}),
        (True, 10, {"optim": SGD, "word_table": {"gradients": "row_wise"}}),
        (True, 10, {"word_table": ADAM_IN_BF16}),
        (False, (1 << 20) - 1, {"optim": SGD, "on_gpu": True}),
        (True, 1 << 20, {"optim": SGD, "on_gpu": True}),
        (True, 1 << 14, {"word_table": {"optimizer": "adagrad"}, "on_gpu": True}),
        (True, 1 << 14, {"optim": SGD, "train": ALL_DEVICES}),
        (True, 1 << 14, {"word_table": ADAM_IN_BF16, "train": ALL_DEVICES}),
        (False, 1 << 14, {"optim": SGD, "train": ALL_DEVICES, "num_devices": 2}),
    ],
)
def test_large_tables_have_row_wise_gradients_where_optimizer_and_devices_allow_it(
    row_wise: bool, num_rows: int, sections: dict[str, Any]
) -> None:
    assert resolved(num_rows, **sections).row_wise == row_wise


def test_optimizer_and_rate_of_the_table_default_to_those_of_the_model() -> None:
    assert (resolved().optimizer, resolved().lr) == (None, 1e-3)
    plain = resolved(optim=SGD | {"lr": 20})
    assert (plain.row_wise, plain.optimizer, plain.lr) == (True, "sgd", 20)
    table = {"optimizer": "adagrad", "lr": 0.05, "tied": True, "gradients": "dense"}
    assert resolved(word_table=table) == WordTable(tied=True, optimizer="adagrad", lr=0.05)
