"""The command: results on stdout, and for each mistake one line, exit code 2 and no damage."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from lm import __version__
from lm.cli import main

Complaint = Callable[..., str]
Contents = Callable[[Path], dict[str, str]]


@pytest.fixture
def untouched(tmp_path: Path, complaint: Complaint, contents: Contents) -> Complaint:
    """`complaint`, which must leave everything in `tmp_path` as it was."""

    def run(*arguments: object) -> str:
        before = contents(tmp_path)
        message = complaint(*arguments)
        assert contents(tmp_path) == before
        return message

    return run


def test_without_a_terminal_a_mistake_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lm.cli", "train", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"lm: {tmp_path}/absent.yaml: cannot read the configuration: No such file or directory\n"
    )


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"sqrtlm {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.hiden=3"], "unknown key model.hiden; did you mean model.hidden?"),
        (["--model.hidden=a"], "model.hidden: Input should be a valid integer, got 'a'"),
        (["--optim.lr=.nan"], "optim.lr: "),
        (
            ["--model.backbone=transformer", "--model.heads=5"],
            "model.hidden = 12 must be a multiple of twice model.heads = 5",
        ),
        (["more"], "expected an override --section.key=value, got 'more'"),
        (["--resume"], "argument --resume: expected one argument"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    tiny: Path, tmp_path: Path, untouched: Complaint, arguments: list[str], message: str
) -> None:
    said = untouched("train", tiny, f"--run_dir={tmp_path / 'run'}", *arguments)
    assert said.removeprefix(f"{tiny}: ").startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        (["evaluate"], "the following arguments are required: RUN"),
        (["evaluate", "r", "--split", "all"], "argument --split: invalid choice: 'all'"),
        (["evaluate", "r", "--splitt=test"], "unknown option --splitt=test"),
        (["evaluate", "r", "--split=test", "--text=t"], "argument --text: not allowed with"),
        (["generate", "r", "--tokens=0"], "argument --tokens: must be at least 1, got 0"),
        (["generate", "r", "--tokens=many"], "argument --tokens: invalid"),
        (["generate", "r", "--top-k=0"], "argument --top-k: must be at least 1, got 0"),
        (["generate", "r", "--samples=-1"], "argument --samples: must be at least 1, got -1"),
        (["generate", "r", "--model.hidden=3"], "unknown option --model.hidden=3"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(
    untouched: Complaint, arguments: list[str], message: str
) -> None:
    assert untouched(*arguments).startswith(message)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--temperature=-1", "temperature must be finite and at least 0, got -1.0"),
        ("--temperature=nan", "temperature must be finite and at least 0, got nan"),
        ("--top-p=0", "top_p must be within (0, 1], got 0.0"),
        ("--top-p=1.5", "top_p must be within (0, 1], got 1.5"),
    ],
)
def test_wrong_options_of_generate_are_named(
    lstm_run: Path, untouched: Complaint, option: str, message: str
) -> None:
    assert untouched("generate", lstm_run, option) == f"generate: {message}"


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_folder_without_a_model_is_named(tmp_path: Path, untouched: Complaint, verb: str) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        folder = tmp_path / name
        expected = f"{folder}: no trained model here (model.json is missing)"
        assert untouched(verb, folder) == expected


@pytest.mark.parametrize("verb", ["classes", "info"])
def test_a_run_without_prepared_data_is_named(
    tiny: Path, tmp_path: Path, untouched: Complaint, verb: str
) -> None:
    said = untouched(verb, tiny, f"--run_dir={tmp_path}")
    assert said.startswith(f"{tmp_path}/data is no prepared folder: it has no meta.json")


def corpus_of(folder: Path, content: bytes) -> list[str]:
    """Options that train on a file with these bytes."""
    path = folder / "text.txt"
    path.write_bytes(content)
    return [f"--data.dir={folder}", "--data.files={train: text.txt}", f"--run_dir={folder / 'run'}"]


def test_a_missing_corpus_file_is_named(tiny: Path, tmp_path: Path, complaint: Complaint) -> None:
    options = [f"--data.dir={tmp_path}", f"--run_dir={tmp_path / 'run'}"]
    said = complaint("train", tiny, *options)
    assert "data.files.train" in said
    assert f"{tmp_path}/train.txt" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a b\nc \xff d\n", "UTF-8"),
        (b"a b\nc \0 d\n", "NUL"),
        (b"", "the corpus has no line"),
    ],
)
def test_a_corpus_that_is_no_text_is_named_with_the_reason(
    tiny: Path, tmp_path: Path, complaint: Complaint, content: bytes, message: str
) -> None:
    said = complaint("train", tiny, *corpus_of(tmp_path, content))
    assert message in said
    assert f"{tmp_path}/text.txt" in said
    assert (tmp_path / "text.txt").read_bytes() == content
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_corpus_too_small_for_the_batch_is_refused_before_the_run_begins(
    tiny: Path, prepared_dir: Path, tmp_path: Path, untouched: Complaint
) -> None:
    said = untouched(
        *("train", tiny, f"--data.prepared_dir={prepared_dir}", f"--run_dir={tmp_path / 'run'}"),
        "--train.batch_size=9999",
    )
    assert re.fullmatch(
        r"the training split has \d+ tokens; train.batch_size = 9999 and train.seq_len = 8"
        r" want 9999 at least",
        said,
    )


def test_limits_that_leave_no_step_are_refused(
    tiny: Path, prepared_dir: Path, tmp_path: Path, untouched: Complaint
) -> None:
    said = untouched(
        *("train", tiny, f"--data.prepared_dir={prepared_dir}", f"--run_dir={tmp_path / 'run'}"),
        *("--train.max_epochs=1", "--train.accumulate=9999"),
    )
    assert said == "train.max_epochs = 1 has fewer batches than train.accumulate = 9999"


def test_an_occupied_folder_is_left_alone(
    tiny: Path, lstm_run: Path, complaint: Complaint, contents: Contents
) -> None:
    before = contents(lstm_run)
    said = complaint("train", tiny, f"--run_dir={lstm_run}")
    assert said == (
        f"{lstm_run} holds a run already: continue it with --resume auto, or choose another"
        " --name or --run_dir"
    )
    assert contents(lstm_run) == before


def test_a_tree_that_is_neither_a_shape_nor_a_file_is_named(
    tiny: Path, prepared_dir: Path, tmp_path: Path, untouched: Complaint
) -> None:
    said = untouched(
        *("train", tiny, f"--data.prepared_dir={prepared_dir}", f"--run_dir={tmp_path / 'run'}"),
        "--output.tree=oak",
    )
    expected = "oak is no known tree (full, two_level, balanced, huffman, adaptive) and no file"
    assert said == f"output.tree: {expected}"


@pytest.mark.parametrize("cutoffs", ["[9, 5]", "[5, 999]", "[5, 5]"])
def test_cutoffs_that_do_not_rise_within_the_vocabulary_are_refused(
    cutoffs: str, tiny: Path, prepared_dir: Path, tmp_path: Path, untouched: Complaint
) -> None:
    said = untouched(
        *("train", tiny, f"--data.prepared_dir={prepared_dir}", f"--run_dir={tmp_path / 'run'}"),
        *("--output.tree=adaptive", f"--output.cutoffs={cutoffs}"),
    )
    assert re.match(r"output.cutoffs: expected rising numbers under \d+, got \[", said)


def test_an_adaptive_softmax_generates_nothing(
    train: Callable[..., Path], tmp_path: Path, untouched: Complaint
) -> None:
    train(tmp_path / "run", "--output.tree=adaptive", "--train.max_steps=1")
    said = untouched("generate", tmp_path / "run")
    assert said == "generate: output.tree: adaptive trains and evaluates only"


def test_a_tree_file_that_lacks_words_is_named(
    tiny: Path, prepared_dir: Path, tmp_path: Path, untouched: Complaint
) -> None:
    tree = tmp_path / "tree.txt"
    tree.write_text("the 0 0\ncat 0 1\n")
    said = untouched(
        *("train", tiny, f"--data.prepared_dir={prepared_dir}", f"--run_dir={tmp_path / 'run'}"),
        f"--output.tree={tree}",
    )
    assert said.startswith(f"output.tree: {tree}")


def test_a_checkpoint_that_is_not_there_is_named(
    tiny: Path, tmp_path: Path, untouched: Complaint
) -> None:
    said = untouched("train", tiny, f"--run_dir={tmp_path / 'run'}", "--resume", "absent.ckpt")
    assert said == "--resume absent.ckpt: no such checkpoint"


def damage(path: Path, kind: str) -> None:
    """Cut a file to half, or flip one bit of a byte in its middle."""
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    if kind == "truncated":
        del content[half:]
    else:
        content[half] ^= 1
    path.write_bytes(content)


@pytest.fixture
def copied_run(lstm_run: Path, prepared_dir: Path, tmp_path: Path) -> Path:
    """A trained run that a test may damage, with its data in its own folder."""
    run = copytree(lstm_run, tmp_path / "run")
    copytree(prepared_dir, run / "data")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"prepared_dir: {prepared_dir}", ""))
    return run


def test_a_run_that_was_moved_is_evaluated_on_the_data_that_moved_with_it(
    lstm_run: Path, copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for run in (lstm_run, copied_run):
        assert main(["evaluate", str(run), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]
    assert json.loads((copied_run / "evaluate-test.json").read_text()) == results[0]


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "vocab.txt", "data/test.npy"])
def test_a_damaged_file_of_a_run_is_named(
    copied_run: Path, untouched: Complaint, name: str, kind: str
) -> None:
    path = copied_run / name
    damage(path, kind)
    text = copied_run.parent / "text.txt"
    text.write_text("the cat sees a dog today\n")
    options = ["--text", text] if name == "vocab.txt" else []
    said = untouched("evaluate", copied_run, *options)
    # A flipped bit of model.json may change a recorded hash: then what it describes seems damaged.
    assert said.startswith((str(path), str(path.with_name("model.safetensors"))))


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_named(
    tiny: Path, copied_run: Path, untouched: Complaint, kind: str
) -> None:
    path = copied_run / "checkpoints" / "last.ckpt"
    damage(path, kind)
    said = untouched(
        *("train", tiny, "--resume=auto", "--train.max_steps=30", f"--run_dir={copied_run}"),
        f"--data.prepared_dir={copied_run / 'data'}",
    )
    assert said.startswith(f"{path}: damaged checkpoint")


def test_evaluating_a_split_that_was_not_prepared_says_which_there_are(
    tiny: Path, tmp_path: Path, complaint: Complaint
) -> None:
    options = corpus_of(tmp_path, b"the cat sees a dog\n" * 40)
    assert main(["train", str(tiny), "--no-progress", "--train.max_steps=1", *options]) == 0
    said = complaint("evaluate", tmp_path / "run", "--split=valid")
    assert said == (
        f"{tmp_path}/run/data has no valid split: give its files as data.files.valid"
        " (prepared: train)"
    )


def test_info_counts_the_parameters_of_the_model(
    lstm_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(lstm_run), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    vocab_size, nodes, hidden = info["vocab_size"], info["tree_nodes"], 12
    assert info["embedding_parameters"] == vocab_size * hidden
    assert info["backbone_parameters"] == 2 * 4 * (2 * hidden * hidden + 2 * hidden)
    assert info["output_parameters"] == (vocab_size + nodes - 1) * (hidden + 1)
    parts = ("embedding_parameters", "backbone_parameters", "output_parameters")
    assert info["parameters"] == sum(info[part] for part in parts)
    megabytes = info["parameters"] * 4 / 2**20
    sizes = [info[f"{part}_mib"] for part in ("weights", "gradients", "optimizer")]
    assert sizes == [round(times * megabytes, 1) for times in (1, 1, 2)]
    sizes += [info["batch_mib"], info["other_mib"]]
    assert info["memory_mib"] == pytest.approx(sum(sizes), abs=0.3)
    assert info["memory_there_mib"] > info["memory_mib"]


def test_info_and_classes_for_people_say_the_same_as_json(
    lstm_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(lstm_run), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert main(["info", str(lstm_run)]) == 0
    table = capsys.readouterr().out
    assert re.search(rf"^parameters +{info['parameters']:,}$", table, re.MULTILINE)
    assert main(["classes", str(lstm_run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["classes", str(lstm_run)]) == 0
    assert capsys.readouterr().out.startswith(f"{report['num_word_classes']} classes of ")


@pytest.mark.parametrize("verb", ["classes", "info"])
def test_classes_that_the_data_were_not_prepared_with_are_not_reported(
    tiny: Path, copied_run: Path, untouched: Complaint, verb: str
) -> None:
    data = copied_run / "data"
    for source in ([tiny, f"--run_dir={copied_run}"], [copied_run]):
        assert untouched(verb, *source, "--classes.method=random") == (
            f"{data} was prepared with classes.method = exchange, not random:"
            " run `lm prepare` first"
        )
    own = np.load(copied_run / "classes.npy")
    np.save(copied_run / "classes.npy", own[::-1])
    assert untouched(verb, copied_run) == (
        f"{data} was prepared again since: its classes are not those of {copied_run}/classes.npy"
    )
    (copied_run / "classes.npy").write_bytes(b"not an array")
    assert untouched(verb, copied_run).startswith(f"{copied_run}/classes.npy is damaged: ")


def test_preparing_shows_bars_to_a_terminal_unless_unwanted(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for option in ([], ["--no-progress"]):
        folder = tmp_path / f"prepared{len(option)}"
        assert main(["prepare", str(tiny), f"--data.prepared_dir={folder}", *option]) == 0
        assert ("lines" in capsys.readouterr().err) == (not option)


def test_a_text_of_one_token_has_no_class_report(
    tiny: Path, tmp_path: Path, untouched: Complaint
) -> None:
    options = corpus_of(tmp_path, b"\n")
    assert main(["prepare", str(tiny), *options]) == 0
    assert untouched("classes", tiny, *options) == (
        "a class report wants two tokens of training text at least, got 1"
    )


def test_the_class_report_of_a_run_sums_to_all_tokens(
    lstm_run: Path, prepared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["classes", str(lstm_run), "--json", "--words=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    word_class = np.load(prepared_dir / "classes.npy")
    assert report["num_word_classes"] == len(np.unique(word_class))
    assert sum(report["token_mass"]) == pytest.approx(1, abs=1e-12)
    assert report["sizes"] == np.bincount(word_class).tolist()
    assert max(len(words) for words in report["top_words"]) == 2
    assert "the" in {word for words in report["top_words"] for word in words}


def test_the_classes_are_drawn(
    lstm_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], complaint: Complaint
) -> None:
    assert main(["classes", str(lstm_run), f"--plot={tmp_path / 'classes.svg'}"]) == 0
    assert "classes of" in capsys.readouterr().out
    picture = (tmp_path / "classes.svg").read_text()
    assert "heaviest" in picture
    said = complaint("classes", lstm_run, f"--plot={tmp_path / 'classes.oak'}")
    assert "Format 'oak' is not supported" in said


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return spare.fileno()

    with open(lstm_run / "env.json", "rb") as spare:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["info", str(lstm_run), "--json"]) == 141
    monkeypatch.undo()
    assert capsys.readouterr().err == ""
