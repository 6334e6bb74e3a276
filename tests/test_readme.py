"""The README is true: its commands run, its file tree is the tree, its figures are their logs'."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest

from lm.cli import main
from lm.training.metrics import read_metrics

TOP = Path(__file__).resolve().parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")
RESULTS = TOP / "scripts" / "results"
DETAILS = (RESULTS / "README.md").read_text(encoding="utf-8")
HEAD = ["--classes.head=5"]
SMALL = {
    "prepare": HEAD,
    "train": [*HEAD, "--model.hidden=8", "--train.max_steps=2", "--no-progress"],
}


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(block: str) -> list[str]:
    return [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]


def test_the_quick_start_is_two_commands_that_exist() -> None:
    quick_start = README.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", quick_start, re.DOTALL)
    assert commands(block) == ["scripts/demo", "scripts/test"]
    assert all((TOP / command).stat().st_mode & 0o111 for command in commands(block))


def test_the_commands_run(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for split in ("train", "valid", "test"):
        shutil.copy(corpus / f"{split}.txt", tmp_path / f"ptb.{split}.txt")
    (tmp_path / "configs").symlink_to(TOP / "configs")
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("sh") if "lm prepare" in block]
    ran = []
    for command in commands(block):
        _, verb, *arguments = shlex.split(command.replace("DIR", "."))
        small = SMALL.get(verb, [])
        assert main([verb, *arguments, *small]) == 0, command
        ran.append(verb)
    assert ran == ["prepare", "train", "evaluate", "generate", "classes", "info"]
    assert "tokens predicted" in capsys.readouterr().out


def test_the_python_example_runs() -> None:
    (block,) = blocks("python")
    names: dict[str, object] = {}
    exec(block.replace("100_000", "1_000"), names)
    layer = names["layer"]
    assert getattr(layer, "weight").grad.abs().sum() > 0  # noqa: B009


def test_figures_of_ten_million_words_are_those_of_their_log() -> None:
    section = README[README.index("## Ten million words") : README.index("## Use")]
    rows = (RESULTS / "ten_million.jsonl").read_text().splitlines()
    expected = []
    for row in map(json.loads, rows):
        if "peak_gb" in row:
            assert row["peak_gb"] == round(row["peak_kib"] * 1024 / 1e9, 2)
            expected.append(f"{row['peak_gb']} GB, {row['seconds'] / 60:.1f} min")
        if "seconds_per_step" in row:
            expected.append(f"{row['seconds_per_step']:.2f} s")
            first, last = (row[f"train_perplexity_{part}_20"] for part in ("first", "last"))
            expected.append(f"{first:,.0f} → {last:,.0f}")
            expected.append(f"| {row['test_perplexity']:,.0f} ")
    assert len(expected) == 17
    assert [figure for figure in expected if figure not in section] == []


def test_figures_of_steps_as_the_vocabulary_grows_are_those_of_their_log() -> None:
    rows = map(json.loads, (RESULTS / "bench_scale.jsonl").read_text().splitlines())
    found = {(row["vocab_size"], row["method"]): row for row in rows}
    section = DETAILS[DETAILS.index("## Growing vocabularies") :]
    lines = [line for line in section.splitlines() if re.match(r"\| 1[0,]+ ", line)]
    assert len(lines) == 4
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        number = int(cells[0].replace(",", ""))
        layer, step = found[number, "layer"], found[number, "step"]
        seconds, whole = layer["cpu_seconds"], step["cpu_seconds"]
        assert cells[1:6] == [
            f"{layer['rows_visited']:,.0f}",
            f"{layer['bytes_per_position'] / 1e3:,.0f}",
            f"{seconds:.2f} ({1e6 * seconds / layer['positions']:.0f})",
            f"{whole:.2f} ({60 / whole:.0f})",
            f"{step['peak_bytes'] / 1e9:.1f}",
        ]
        for cell, name in zip(cells[6:], ("dense", "full", "gather", "host", "loop"), strict=True):
            row = found.get((number, name))
            if row is None:
                assert cell == "–"
            elif row["outcome"] == "done":
                assert cell == f"{row['cpu_seconds']:.2f}"
            else:
                assert cell == {"memory": "memory", "time": "> 60 s"}[row["outcome"]]


def test_ratios_of_tokens_per_second_are_those_of_their_log() -> None:
    rows = [json.loads(line) for line in (RESULTS / "bench_train.jsonl").read_text().splitlines()]
    rate = {
        ("EPYC" in row["machine"], row["overrides"][0], row["tree"]): row[
            "tokens_per_second_median"
        ]
        for row in rows
        if row["config"] == "ptb_lstm_small.yaml"
    }
    path = "two_level,model.input=path,model.input_backoff=5"
    trees = ("full", "torch", "full,train.matmul_precision=medium", "adaptive", path, "none")
    section = DETAILS[DETAILS.index("| tokens per second of the class softmax") :]
    lines = section.splitlines()[2 : 2 + len(trees)]
    for line, tree in zip(lines, trees, strict=True):
        assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [
            f"{rate[epyc, option, 'two_level'] / rate[epyc, option, tree]:.2f}"
            for epyc in (True, False)
            for option in ("--train.precision=bf16-mixed", "--train.precision=32-true")
        ]
    found = re.search(r"by path: (\S+) and (\S+) × the full .*, (\S+) and (\S+) × at", section)
    assert found is not None
    for place, recipe in enumerate(("wikitext2_lstm.yaml", "eltec_hun_lstm.yaml"), start=1):
        speed = {
            row["tree"]: row["tokens_per_second_median"] for row in rows if row["config"] == recipe
        }
        full = "full,model.input=word,model.input_backoff=0"
        for shown, peer in (
            (found[place], full),
            (found[place + 2], f"{full},train.matmul_precision=medium"),
        ):
            assert shown == f"{speed['two_level'] / speed[peer]:.1f}"


def test_figures_of_making_classes_are_those_of_their_log() -> None:
    rows = (RESULTS / "bench_classes.jsonl").read_text().splitlines()
    found = {row["method"]: row for row in map(json.loads, rows)}
    text = README[README.index("Making classes for") : README.index("The output layer alone")]
    embedding, exchange = found["embedding"], found["exchange"]
    assert embedding["peak_mib"] == exchange["peak_mib"]  # exchange begins with the other's classes
    for figure in (
        f"for {embedding['vocab_size']:,} words from {embedding['tokens'] / 1e6:.1f} million",
        f"by embedding {embedding['seconds']:.0f} s and {embedding['peak_mib'] / 1024:.1f} GiB",
        f"{exchange['seconds']:.0f} s in all and no more memory",
    ):
        assert figure in text


def test_ratios_of_the_output_layer_alone_are_those_of_their_log() -> None:
    rows = (RESULTS / "bench_output_layer.jsonl").read_text().splitlines()
    found = {(row["vocab_size"], row["method"]): row for row in map(json.loads, rows)}
    text = README[README.index("The output layer alone, forward") : README.index("So `grouped_mm`")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    header, _, *table = (line for line in lines if len(line) == 4)
    sizes = [int(cell.removeprefix("N = ").replace(",", "")) for cell in header[1:]]
    methods = ("full", "chunked", "adaptive", "gather", "grouped", "loop", "floor")
    assert sizes == [10_000, 33_278, 267_735]
    for line, method in zip(table, methods, strict=True):
        for size, cell in zip(sizes, line[1:], strict=True):
            ours, at_random = found[size, "blocks"], found[size, "random"]
            if method == "floor":
                pair = [ours["ratio_to_floor"], at_random["ratio_to_floor"]]
            else:
                seconds = found[size, method]["seconds_median"]
                pair = [seconds / ours["seconds_median"], seconds / at_random["seconds_median"]]
            shown = re.findall(r"[\d.]+", cell)
            if method == "grouped":
                assert cell.startswith("("), "classes of one size are the random ones"
                pair = pair[1:]
            digits = [len(figure.partition(".")[2]) for figure in shown]
            assert shown == [f"{x:.{n}f}" for x, n in zip(pair, digits, strict=True)], method


def test_bytes_of_the_kernels_are_those_of_their_log() -> None:
    rows = (RESULTS / "kernel_bytes.jsonl").read_text().splitlines()
    found = {row["N"]: row for row in map(json.loads, rows) if row["classes"] == "random"}
    section = DETAILS[DETAILS.index("## Kernels") : DETAILS.index("## Growing vocabularies")]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"][2:]
    ratios = ("cache", "half_cache", "memory", "all")
    assert [int(line[0].replace(",", "")) for line in table] == list(found)
    for line, row in zip(table, found.values(), strict=True):
        assert line[1:4] == [str(row["H"]), f"{row['floor_mb']:,}", f"{row['cache_mb']:,}"]
        assert line[4:] == [f"{row[f'{name}_ratio']:.2f}" for name in ratios]


def validations(name: str) -> list[float]:
    """Validation perplexity after each epoch."""
    lines = read_metrics(RESULTS / f"{name}.csv")
    return [line.valid_perplexity for line in lines if line.valid_perplexity is not None]


def test_what_is_said_of_the_curves_of_wikitext2_is_in_them() -> None:
    full = validations("wikitext2_small/full_softmax-1")
    noisy = validations("wikitext2_lstm-full_noise_by_count")
    word, path = (
        validations(f"wikitext2_small/classes_by_exchange_input_by_{what}-1")
        for what in ("word", "path")
    )
    text = " ".join(DETAILS.split())
    for said in (
        f"(validation {path[0]:.0f} against {full[0]:.0f} after one, "
        f"{path[9]:.1f} against {full[9]:.1f} after ten)",
        f"at {noisy[6]:.1f} after seven, where that is at {full[6]:.1f}, the classes read by word "
        f"at {word[6]:.1f} and read by path at {path[6]:.1f}",
    ):
        assert said in text
    assert all(ours < theirs for ours, theirs in zip(path, full, strict=True))
    assert "they are ahead for six epochs only" in text
    ahead = [ours < theirs for ours, theirs in zip(word, full, strict=True)]
    assert ahead == [True] * 6 + [False] * 4
    assert "at each of them but the sixth" in text
    behind = [ours > theirs for ours, theirs in zip(noisy, full, strict=False)]
    assert behind == [True] * 5 + [False, True]
    assert f"was {100 * (noisy[6] / full[6] - 1):.1f} % behind" in " ".join(README.split())


def test_what_is_said_of_hungarian_is_in_its_logs() -> None:
    words, pieces, read_by_word = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in (
            "hungarian/words_input_by_path-1",
            "hungarian/SentencePiece_five_epochs-1",
            "eltec_hun_lstm-read_by_word",
        )
    )
    assert words["environment"]["processor"] == pieces["environment"]["processor"]
    test = words["test"]
    share = f"{100 * test['oov'] / test['tokens']:.1f} %"
    perplexity = pieces["test"]["word_perplexity"]
    lead = test["tokens"] * math.log(perplexity / test["perplexity"]) / test["oov"]
    section = " ".join(DETAILS[DETAILS.index("## Hungarian") :].split())
    for said in (
        f"{words['seconds'] / 60:.0f} minutes by words, which is two epochs",
        f"{pieces['seconds'] / 60:.0f} by 8,000 SentencePiece units, which is five",
        f"{test['oov']:,} words of the test split, {share}, occur less than twice",
        f"lead is {lead:.1f} nats for each of them",
        f"it was {read_by_word['test']['perplexity']:.1f} after the same two epochs",
    ):
        assert said in section
    assert f"{share} are out of the vocabulary" in README
    assert round(pieces["seconds"] / words["seconds"], 1) == 1.2
    assert f"reach {perplexity:.0f} a word in a fifth more time" in README
