"""Continuations, and the model of lm-evaluation-harness that scores them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lm
from lm.adapters.harness import HarnessModel, register
from lm.loaded import LoadedModel
from tests.conftest import PIECES_WITH_BYTES, Train

pytestmark = pytest.mark.filterwarnings("ignore:.* the probability of all unknown words")
PAIRS = [("", "the old cat"), ("the old", " cat sees a dog"), ("the old ", "cat"), ("the", " ")]
PAIRS += [("the cat sees a dog today\n", "the old"), ("a zebra", " zebra"), ("a", "")]
PAIRS += [("the old cat", " finds zebra\nthe quagga")]


@pytest.fixture(scope="module", params=["lstm", "transformer", "pieces"])
def model(request: pytest.FixtureRequest, letters: Train) -> LoadedModel:
    name = request.param
    run = letters("harness", *PIECES_WITH_BYTES) if name == "pieces" else None
    model = lm.load(run or request.getfixturevalue(f"{name}_run"), open_vocabulary=True)
    model.model.double()
    return model


def test_continuations_have_the_log_prob_of_steps_and_are_greedy_if_each_is_the_best(
    model: LoadedModel,
) -> None:
    (greedy,) = model.generate("the old", num_tokens=2, temperature=0)
    pairs = [*PAIRS, ("the old", greedy)]
    for (context, text), found in zip(pairs, model.continuation_log_prob(pairs), strict=True):
        before = model.encode(context)
        ids = model.encode(context + text)
        num_known = len(before) if ids[: len(before)] == before else len(before) - 1
        state, log_prob, is_greedy = model.start(ids[:num_known]), 0.0, True
        for token in ids[num_known:]:
            is_greedy &= model.topk(state, 1)[0][0] == model.word(token)
            step = model.step(state, token)
            log_prob, state = log_prob + step.log_prob, step.state
        num_unknown = ids[num_known:].count(model.unk_id)
        log_prob += model._scorer.unknown_log_prob([text], num_unknown).sum()
        assert found.log_prob == pytest.approx(log_prob, abs=1e-9)
        assert found[1:3] == (is_greedy, num_unknown)
        assert found.context == min(num_known + 1, model.model.backbone.receptive_field or 99)
    assert found.is_greedy or model.tokenizer.kind != "words"  # random bytes are read otherwise


def test_a_word_that_begins_in_the_context_is_predicted_as_a_whole(lstm_run: Path) -> None:
    model = lm.load(lstm_run)
    for ends in (("the ol", "d cat"), ("the zeb", "ra cat"), ("the zeb", "ra")):  # known or not
        inside, outside = model.continuation_log_prob([ends, ("the", " " + "".join(ends)[4:])])
        assert inside == outside
    assert model.continuation_log_prob([]) == []
    (whole,), (score,) = model.continuation_log_prob([("", "a cat\n")]), model.score(["a cat"])
    assert whole.log_prob == pytest.approx(score.total, rel=1e-6)


def test_items_and_texts_without_a_context_have_no_continuations(
    items_run: Path, lstm_run: Path
) -> None:
    with pytest.raises(ValueError, match="independent sequences"):
        lm.load(items_run).continuation_log_prob([("", "a")])
    model: Any = lm.load(lstm_run)
    for pairs in ("the", ["ab"], [("a",)], [("a", "b", "c")], [("a", 3)]):
        with pytest.raises(ValueError, match=r"expected (a list of )?(pairs of texts|text), got"):
            model.continuation_log_prob(pairs)


def requests(*arguments: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


def check(adapter: Any, run: Path) -> None:
    model = lm.load(run, open_vocabulary=True)
    scores = model.continuation_log_prob(PAIRS)
    assert adapter.loglikelihood(requests(*PAIRS)) == [tuple(score[:2]) for score in scores]
    texts = ["the cat", "a zebra\nthe dog"]
    rolling = [score.log_prob for score in model.continuation_log_prob([("", t) for t in texts])]
    assert adapter.loglikelihood_rolling(requests(*((t,) for t in texts))) == rolling
    (first, second, nothing) = adapter.generate_until(
        requests(
            ("the", {"until": ["\n", ""], "max_gen_toks": 5, "temperature": 0.0}),
            ("the", {"until": "a", "do_sample": True, "max_tokens": 9, "top_k": 1}),
            ("the", {"max_gen_toks": 0}),
        )
    )
    (greedy,) = model.generate("the", num_tokens=9, temperature=0)
    assert greedy.startswith(first)
    assert (second, nothing) == (greedy.split("a")[0], "")


def test_the_methods_of_the_harness_have_the_figures_of_the_model(lstm_run: Path) -> None:
    check(HarnessModel(str(lstm_run), batch_size=1), lstm_run)


def test_the_harness_finds_the_model(lstm_run: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.api.registry import get_model

    assert register() is get_model("sqrtlm")
    given = {"batch_size": 1, "device": "cpu", "max_batch_size": None}
    check(get_model("sqrtlm").create_from_arg_string(f"run={lstm_run},threads=1", given), lstm_run)
