"""What is logged: `metrics.csv`, the curves and wandb."""

import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from lightning.fabric import Fabric
from matplotlib.axes import Axes

from data_prep.errors import NotFiniteError, UserError
from lm.config import Config, TrainConfig, validate
from lm.training.clock import Clock
from lm.training.loggers import MetricsFile, ProgressBar, check_wandb, open_loggers, wandb_mode
from lm.training.metrics import Metrics, draw_curves, read_metrics
from lm.training.progress import Progress
from lm.training.signals import Interrupted
from tests.conftest import Train


def test_wandb_offline_records_the_configuration_and_figures(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--log.wandb=offline", "--train.max_steps=5")
    (written,) = (run / "wandb").glob("offline-run-*")
    (record,) = written.glob("run-*.wandb")
    content = record.read_bytes()
    assert (run / "wandb-id").read_text().encode() in content
    for figure in (b"checkpoint_every_steps", b"prepared_dir", b"train_perplexity"):
        assert figure in content


def a_clock(num_steps: int) -> Clock:
    fabric, batches = Fabric(accelerator="cpu", devices=1), SimpleNamespace(num_steps=num_steps)
    return Clock(fabric, Progress(), TrainConfig(), cast(Any, batches), None)


def figures(step: int, valid: float | None) -> Metrics:
    perplexities: Any = {"train_perplexity": 123.45, "valid_perplexity": valid}
    rates: Any = {"learning_rate": 1e-3 / 3, "tokens_per_second": 13061.0}
    return Metrics(step=step, epoch=12.5, tokens=9, seconds=1.0, **perplexities, **rates)


def test_a_continuation_rewrites_the_lines_of_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    lines = [figures(step, None if step % 2 else 1 / 3) for step in (1, 2, 3)]
    metrics = MetricsFile(path, 0)
    for line in lines:
        metrics.log(line)
    assert read_metrics(path) == lines
    path.write_text(path.read_text() + "4,1.3")
    assert read_metrics(path) == lines
    MetricsFile(path, 2)
    assert read_metrics(path) == lines[:2]


def test_a_terminal_of_80_columns_shows_the_validation_perplexity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    bar = ProgressBar(10_000, a_clock(10_790))
    bar.log(figures(10_500, 109.77))
    bar.step(10_500)
    bar.log(figures(10_600, None))
    bar.close()
    last = re.split(r"[\r\n]", capsys.readouterr().err.rstrip())[-1]
    assert len(last) <= 80
    for part in ("train 10500/10790", "valid ppl 109.77", "ppl 123.5", "13061 tokens/s"):
        assert part in last


def test_lines_without_a_terminal_have_the_time_left_and_a_validation_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])
    monkeypatch.setattr("lm.training.loggers.time.monotonic", lambda: seconds[0])
    caplog.set_level("INFO")
    clock = a_clock(150)
    bar = ProgressBar(50, clock)

    def run_to(first: int, last: int) -> None:
        for step in range(first + 1, last + 1):
            seconds[0] += 4.0
            clock.step()
            bar.step(step)

    run_to(50, 75)
    bar.log(figures(75, 88.5))
    run_to(75, 77)
    bar.log(figures(77, None))  # too soon after the line before it
    run_to(77, 85)
    bar.log(figures(85, None))
    assert caplog.messages == [
        "about 0:06:08 left, 4 s a step",
        "step 75 of 150: epoch 12.50, valid ppl 88.50, ppl 123.5, 13061 tokens/s, 0:05:00 left",
        "step 85 of 150: epoch 12.50, ppl 123.5, 13061 tokens/s, 0:04:20 left",
    ]
    clock.limit = clock.progress.elapsed_seconds + 100  # by which the run ends, before step 150
    bar = ProgressBar(85, clock)
    bar.log(figures(85, None))
    assert caplog.messages[-1].startswith("step 85: epoch 12.50, ppl 123.5")
    assert caplog.messages[-1].endswith("0:01:40 left")
    clock.share = 1.0  # the last step, though soon after the line before it
    bar.log(figures(86, None))
    assert caplog.messages[-1].startswith("step 86: ")


def test_the_curve_leaves_out_perplexities_of_few_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = MetricsFile(tmp_path / "metrics.csv", 0)
    for step in (100, 200, 202, 300, 302):
        file.log(replace(figures(step, 60.0 if step in (202, 302) else None), tokens=10_000 * step))
    drawn: list[tuple[list[int], list[float]]] = []

    monkeypatch.setattr(Axes, "plot", lambda _, x, y, *__, **options: drawn.append((x, y)))
    monkeypatch.setattr(Axes, "legend", lambda _: None)
    draw_curves(tmp_path, "run")
    training, validation = drawn
    assert training == ([1_000_000, 2_000_000, 3_000_000], [123.45] * 3)
    assert validation == ([2_020_000, 3_020_000], [60.0] * 2)


def test_titles_are_no_math_and_in_any_language(tmp_path: Path) -> None:
    for title in ("a$_$b", "$", "a_b^c", "\\frac", "$x", "日本語"):
        draw_curves(tmp_path, title)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def logs_to_wandb(mode: str) -> Config:
    return validate({"name": "a", "train": {"max_steps": 1}, "log": {"wandb": mode}}, "c")


@pytest.mark.parametrize(
    ("end", "code"), [(None, 0), (NotFiniteError("x"), 5), (Interrupted(15), 143), (OSError(), 1)]
)
def test_wandb_knows_how_a_run_has_ended_and_counts_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException | None, code: int
) -> None:
    wandb, id_file = MagicMock(Error=RuntimeError), tmp_path / "wandb-id"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config, fabric = replace(logs_to_wandb("offline"), run_dir=str(tmp_path)), MagicMock()
    clock = SimpleNamespace(num_steps=9, limit=None, share=0, seconds_left=lambda step: None)
    common = {"config": config, "fabric": fabric, "clock": clock, "progress": Progress()}
    state: Any = SimpleNamespace(step=0, **common)
    id_file.write_text(" my-run\n")
    run = wandb.init.return_value
    with suppress(Exception, SystemExit), open_loggers(state, progress=False) as (_, _, logger):
        for run.resumed in (True, False):
            logger.log(figures(7, None))
        if end is not None:
            raise end
    assert wandb.init.call_args.kwargs["id"] == "my-run"
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [None, 7]
    run.finish.assert_called_once_with(code)
    for damaged in ("", "a/b", "\0"):
        id_file.write_text(damaged)
        with pytest.raises(UserError, match=f"{id_file}: expected the id of a wandb run, got '"):
            open_loggers(state, progress=False).__enter__()


def test_the_variable_of_wandb_is_respected_where_wandb_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert wandb_mode(logs_to_wandb("offline")) == "offline"
    for given, variable, expected in (
        ("disabled", "online", "disabled"),
        ("offline", "disabled", "disabled"),
        ("online", "offline", "offline"),
        ("offline", "", "offline"),
    ):
        monkeypatch.setenv("WANDB_MODE", variable)
        assert wandb_mode(logs_to_wandb(given)) == expected
        check_wandb(logs_to_wandb(given))
    monkeypatch.setenv("WANDB_MODE", "bogus")
    with pytest.raises(UserError, match="WANDB_MODE=bogus: expected disabled, offline or online"):
        check_wandb(logs_to_wandb("online"))
