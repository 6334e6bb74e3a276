"""Adaptation to a text: the cache's definition, dynamic evaluation, causality, commands."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from lm.run import TrainedRun
from lm.scoring import adaptation
from lm.scoring.adaptation import Adaptation, Cache, read_dynamic
from tests.models import new_model, small_model

THETA, WINDOW = 0.3, 4


@pytest.mark.parametrize("sizes", [[13], [1, 5, 7], [1] * 13])
def test_a_cache_equals_the_definition(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "SCORES_AT_ONCE", 40)
    hidden, words = torch.randn(13, 6), torch.randint(3, (13,))
    cache = Cache(WINDOW, [1.0, THETA])
    parts = zip(torch.split(hidden, sizes), torch.split(words, sizes), strict=True)
    found = torch.cat([cache.log_prob(*part)[1] for part in parts])
    assert found[0].isnan()
    expected = []  # the sums of equation (1), by its definition
    for t in range(1, 13):
        past = range(max(0, t - WINDOW), t)
        weights = {i: math.exp(THETA * float(hidden[i] @ hidden[t])) for i in past}
        same = sum(weight for i, weight in weights.items() if words[i] == words[t])
        expected.append(same / sum(weights.values()))
    np.testing.assert_allclose(found[1:].exp().numpy(), expected, rtol=1e-5)


def test_the_probabilities_of_all_words_add_up_to_1() -> None:
    hidden, words = torch.randn(9, 6), torch.randint(3, (9,))
    log_prob = torch.log_softmax(torch.randn(9, 3, dtype=torch.float64), 1)
    for t in range(9):
        total = 0.0
        for word in range(3):
            mix = Adaptation(weights_sha256="", theta=THETA, weight=0.7).mixer()
            text = torch.cat([words[:t], torch.tensor([word])])
            total += float(mix(hidden[: t + 1], text, log_prob[range(t + 1), text])[-1].exp())
        assert total == pytest.approx(1)


def dynamic(model: LanguageModel, parts: list[Any], lr: float, context: int = 6) -> Tensor:
    """Log-probabilities of a text that a model learns from."""
    read = read_dynamic(model, parts, 0, context, lr)
    found = [-model.output.loss(hidden, targets, "none") for hidden, targets, _ in read]
    return torch.cat(found).detach()


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
def test_a_model_learns_from_each_segment_after_it_is_predicted(
    backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient descent of the whole model, segment by segment, and no token sees later ones."""
    monkeypatch.setattr(adaptation, "SEGMENT", 3)
    tree = ClassTree.two_level(torch.arange(20) % 5)
    text = np.random.default_rng(1).integers(20, size=14)
    models = [small_model(tree, backbone).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    found = dynamic(models[0], [text], 0.1)
    plain, expected = models[1], list[Tensor]()
    state: tuple[Tensor, ...] | None = None
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    stream = torch.from_numpy(np.append(0, text))
    for begin in range(0, 14, 3):
        end = min(14, begin + 3)
        first = begin if backbone == "lstm" else max(0, end - 6, begin - 3)
        hidden, state = plain(stream[first:end, None], None if backbone != "lstm" else state)
        state = state and tuple(each.detach() for each in state)
        nll = plain.output.loss(hidden[begin - first :, 0], stream[begin + 1 : end + 1], "none")
        expected.append(-nll.detach())
        torch.autograd.backward(nll.mean())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found, torch.cat(expected))
    models[0].load_state_dict(small_model(tree, backbone).state_dict())
    before = {name: value.clone() for name, value in models[0].state_dict().items()}
    whole = dynamic(models[0], [text[:5], text[5:]], 0.1)
    models[0].load_state_dict(before)
    text[10] = (text[10] + 1) % 20
    other = dynamic(models[0], [text], 0.1)
    torch.testing.assert_close(other[:10], whole[:10])
    assert (other[11:] != whole[11:]).all()


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_a_text_visits_change_as_with_dense_gradients(tied: bool) -> None:
    tree, text = ClassTree.two_level(torch.arange(90) % 9), np.arange(30) % 7
    values = []
    for row_wise in (False, True):
        model = new_model(tree, {}, tied=tied, row_wise=row_wise, embedding=None if tied else 12)
        before = model.tree_softmax.weight.detach().clone()
        values.append(dynamic(model.train(), [text], 0.5))
        changed = (model.tree_softmax.weight != before).any(1)
        assert changed[tree.row_of_word[:7]].all()
        assert not changed[tree.row_of_word[[7, 8, 16]]].any()  # of classes without a word
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("best", [-9, -4, -1, 0, 3, None])
def test_the_learning_rate_is_the_power_of_2_of_the_lowest_perplexity_or_0(
    best: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Any, tokens: Any, lr: float = 0.0) -> Any:
        log_prob = -99.0 if not lr else -100.0 if best is None else -abs(math.log2(lr) - best)
        yield None, None, torch.tensor([log_prob])

    monkeypatch.setattr(adaptation, "_read", read)
    run: Any = None
    assert adaptation._tuned_lr(run, np.arange(3)) == (0 if best is None else 2.0**best)


@pytest.mark.parametrize("name", ["lstm_run", "transformer_run", "pieces_run"])
def test_commands_adapt_with_what_the_validation_split_has_chosen(
    name: str,
    request: pytest.FixtureRequest,
    corpus: Path,
    tmp_path: Path,
    printed: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`lm score --stream` has the figure of `lm evaluate`, by settings that are tuned once."""
    run = copytree(request.getfixturevalue(name), tmp_path / "run")
    both = json.loads(printed("evaluate", run, "--cache", "--dynamic", "--json"))
    found, settings = both["adaptation"], json.loads((run / "adaptation.json").read_text())
    assert found["adaptation"] == settings
    assert found["perplexity_model"] == pytest.approx(both["perplexity"])
    assert found["perplexity_dynamic"] < found["perplexity_model"] or not settings["lr"]
    monkeypatch.setattr(adaptation, "THETAS", ())  # which tuning again would use
    is_open = ["--open-vocabulary"] * (name != "pieces_run")
    opened = json.loads(printed("evaluate", run, "--cache", "--dynamic", "--json", *is_open))
    for kind in ("cache", "dynamic"):
        options = "--stream", f"--{kind}", "--format=json", "--level=summary"
        for figures, spelled in ((opened["adaptation"], is_open), (found, [])):
            text = printed("score", run, corpus / "test.txt", *options, *spelled)
            score = json.loads(text)["summary"]
            assert score["perplexity"] == pytest.approx(figures[f"perplexity_{kind}"], rel=1e-5)
        changes = settings["weight"] < 0.99 if kind == "cache" else settings["lr"]
        assert (score["perplexity"] < both["perplexity"] - 0.01) or not changes
    text = f"--text={corpus / 'test.txt'}"
    both = json.loads(printed("evaluate", run, "--dynamic", "--json", text))
    assert both["adaptation"]["perplexity_cache"] is None
    (run / "adaptation.json").write_text(json.dumps(settings | {"weights_sha256": "other"}))
    monkeypatch.undo()
    both = json.loads(printed("evaluate", run, "--cache", "--json"))
    assert both["adaptation"]["adaptation"] == settings | {"lr": None}
    assert TrainedRun(run, "cpu").description.weights_sha256 == settings["weights_sha256"]
