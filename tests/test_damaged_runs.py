"""Runs that were moved, are not complete or have a damaged file: a result, or one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from lm.cli import main
from lm.model.files import read_description
from tests.conftest import Printed


def test_a_run_that_was_moved_is_evaluated_on_the_data_that_moved_with_it(
    lstm_run: Path, copied_run: Path, printed: Printed
) -> None:
    results = [json.loads(printed("evaluate", run, "--json")) for run in (lstm_run, copied_run)]
    assert results[0] == results[1]
    assert json.loads((copied_run / "evaluate-test.json").read_text()) == results[0]


def test_a_run_whose_training_is_not_complete_names_the_command_that_continues_it(
    copied_run: Path, complaint: Printed
) -> None:
    (copied_run / "model.json").unlink()
    expected = "no trained model here (model.json is missing); `lm train"
    expected += f" {copied_run} --resume auto` continues the training"
    assert complaint("evaluate", copied_run) == f"{copied_run}: {expected}"
    options = ["--resume=auto", "--no-progress", "--train.max_steps=30"]
    tokenizer = copied_run / "tokenizer.json"
    content = tokenizer.read_text()
    tokenizer.write_text(content[:20])
    assert complaint("train", copied_run, *options).startswith(f"{tokenizer} is not the tokenizer")
    tokenizer.write_text(content)
    assert main(["train", str(copied_run), *options]) == 0
    assert main(["evaluate", str(copied_run)]) == 0


def test_a_flipped_bit_of_a_description_is_found_or_changes_no_value(copied_run: Path) -> None:
    path = copied_run / "model.json"
    content, truth = path.read_bytes(), read_description(copied_run)
    for place, byte in enumerate(content):
        path.write_bytes(content[:place] + bytes([byte ^ 1]) + content[place + 1 :])
        message = str(path)
        try:
            assert read_description(copied_run) == truth  # the last of 17 digits of a float
        except UserError as error:
            message = str(error)
        assert message.startswith(str(path))


def test_the_rule_of_empty_lines_of_a_run_without_a_configuration_is_reported(
    copied_run: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = ["evaluate", str(copied_run), "--text", str(corpus / "test.txt")]
    assert main(text) == 0
    (copied_run / "config.yaml").unlink()
    assert "config.yaml" not in caplog.text
    assert main(text) == 0
    message = f"{copied_run} has no config.yaml: empty lines are counted as lines"
    assert caplog.messages.count(message) == 1


def test_data_prepared_with_another_tokenizer_are_an_error(
    tiny: Path, copied_run: Path, complaint: Printed
) -> None:
    assert main(["prepare", str(tiny), f"--run_dir={copied_run}", "--tokenizer.vocab_size=9"]) == 0
    expected = f"data was prepared again, with another tokenizer than that of {copied_run}"
    assert complaint("evaluate", copied_run, code=3) == f"{copied_run}/{expected}"


@pytest.mark.parametrize("verb", ["classes", "info"])
def test_data_prepared_with_other_classes_are_an_error(
    copied_run: Path, untouched: Printed, verb: str
) -> None:
    data = copied_run / "data"
    classes = np.load(copied_run / "classes.npy")
    np.save(copied_run / "classes.npy", classes[::-1])
    expected = f"{data} was prepared again: its classes are not those of {copied_run}/classes.npy"
    assert untouched(verb, copied_run, code=3) == expected
    content = bytearray((copied_run / "classes.npy").read_bytes())
    content[8] ^= 0x40  # the size of the header
    for damaged in (content, b"not an array"):
        (copied_run / "classes.npy").write_bytes(damaged)
        message = "classes.npy is damaged, or not an array of numbers"
        assert untouched(verb, copied_run, code=3) == f"{copied_run}/{message}"
    (copied_run / "classes.npy").unlink()
    (data / "classes.npy").write_bytes(b"short")
    assert untouched(verb, copied_run).startswith(f"{data}/classes.npy is damaged: 5 bytes")
