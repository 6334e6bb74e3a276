"""A loaded model has the probabilities of the network, in every form in which it gives them."""

import json
import math
import pydoc
import re
import warnings
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lm
from data_prep.errors import UserError
from lm.evaluation import evaluate_text
from lm.figures import Evaluation
from lm.loaded import LoadedModel, Word
from lm.run import TrainedRun
from tests.conftest import Printed, Train
from tests.models import log_probs

pytestmark = pytest.mark.filterwarnings("ignore:.* the probability of all unknown words")
SENTENCE = "the old cat sees a zebra today\na dog finds the horse again"  # zebra is unknown


@pytest.fixture
def loaded(run: Path) -> LoadedModel:
    """In fp64; the Transformer attends to 8 tokens, fewer than the sentence has."""
    loaded = lm.load(run)
    loaded.model.double()
    return loaded


def test_topk_begins_the_sorted_distribution_without_unknown_words(loaded: LoadedModel) -> None:
    log_prob = loaded.log_prob(SENTENCE)
    log_prob[loaded.unk_id] = -torch.inf
    best = log_prob.topk(4)
    words, found = zip(*loaded.topk(SENTENCE, 4), strict=True)
    assert list(words) == [loaded.tokenizer.token(word) for word in best.indices.tolist()]
    torch.testing.assert_close(torch.tensor(found).double(), best.values, rtol=0, atol=1e-6)
    assert loaded.topk(loaded.start(SENTENCE), 1) == loaded.topk(SENTENCE, 1)
    assert [word for word, _ in loaded.topk(SENTENCE, 3, exclude=[words[0]])] == list(words[1:])


def test_step_by_step_equals_one_pass(loaded: LoadedModel) -> None:
    ids = loaded.encode(SENTENCE)
    truth = log_probs(loaded.model, [loaded.eos_id, *ids])
    state = loaded.start()
    for place, token in enumerate(ids):
        torch.testing.assert_close(loaded.log_prob(state), truth[place], rtol=0, atol=1e-12)
        log_prob, state = loaded.step(state, token)
        assert log_prob == pytest.approx(float(truth[place, token]), abs=1e-12)
    for prefix in (state, SENTENCE, ids):
        torch.testing.assert_close(loaded.log_prob(prefix), truth[-1], rtol=0, atol=1e-12)
    assert (state.num_tokens, state.num_unknown) == (len(ids), 1)


def test_a_model_with_pieces_of_words_is_used_without_finding_them_again(
    train: Train, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    run = train(tmp_path / "run", "--model.input_pieces=40", "--train.max_steps=8")
    monkeypatch.setattr("data_prep.tokenizer.pieces.find_pieces", None)
    loaded = lm.load(run)
    trained = json.loads((run / "model.json").read_text())["valid_perplexity"]
    assert loaded.perplexity((corpus / "valid.txt").read_text()) == pytest.approx(trained, rel=1e-6)
    assert json.loads(printed("info", run, "--json"))["input_pieces_parameters"] == 40 * 12
    loaded.model.double()
    test_step_by_step_equals_one_pass(loaded)


def test_forks_do_not_change_the_state_they_start_from(loaded: LoadedModel) -> None:
    state = loaded.start("the old")
    before = loaded.log_prob(state)
    for word in ("cat", "dog"):
        found = loaded.log_prob(loaded.step(state, word).state)
        torch.testing.assert_close(found, loaded.log_prob(f"the old {word}"), rtol=0, atol=1e-12)
    assert torch.equal(loaded.log_prob(state), before)
    with pytest.raises(FrozenInstanceError):
        state.num_tokens = 0  # type: ignore[misc]


def test_many_steps_equal_single_ones(loaded: LoadedModel) -> None:
    prefixes = ["", "the", "the old cat sees a dog today", "a man\nthe", "the", SENTENCE]
    words: list[Word] = ["the", "cat", loaded.eos_id, "zebra", "the cat sees", "today"]
    states = [loaded.start(prefix) for prefix in prefixes]
    for prefix, word, step in zip(prefixes, words, loaded.step_many(states, words), strict=True):
        single = loaded.step(loaded.start(prefix), word)
        assert step.log_prob == pytest.approx(single.log_prob, abs=1e-12)
        found, truth = map(loaded.log_prob, (step.state, single.state))
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
        assert step.state.num_tokens == single.state.num_tokens
        assert step.state.num_unknown == single.state.num_unknown
    assert loaded.step_many([], []) == []


def test_perplexity_is_that_of_evaluate(run: Path, corpus: Path) -> None:
    text = (corpus / "test.txt").read_text()
    opened = TrainedRun(run, "cpu")
    expected = evaluate_text(opened, text.removesuffix("\n").split("\n"), progress=False)
    assert lm.load(run).evaluate(text) == expected
    assert lm.load(run).perplexity(text) == expected.perplexity


def test_candidates_equal_the_whole_distribution(loaded: LoadedModel) -> None:
    words: list[Word] = ["cat", "zebra", "the", "cat", loaded.eos_id]
    state = loaded.start("the old")
    expected = loaded.log_prob(state)[[*loaded.encode("cat zebra the cat"), loaded.eos_id]]
    for prefix in (state, "the old", loaded.encode("the old")):
        actual = loaded.candidate_log_prob(prefix, words)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    states = [loaded.start(text) for text in ("", "the old", "the old cat\nthe", "the old")]
    several: list[Word] = ["cat sees", "dog"]
    lists: list[Any] = [words, several, []]
    for each in lists:
        single = torch.stack([loaded.candidate_log_prob(state, iter(each)) for state in states])
        actual = loaded.candidate_log_probs(states, each)
        torch.testing.assert_close(actual, single, rtol=0, atol=1e-12)
    assert loaded.candidate_log_probs([], ["cat"]).shape == (0, 1)


def test_unknown_words_are_listed(loaded: LoadedModel) -> None:
    assert loaded.unknown_words(SENTENCE) == ["zebra"]
    assert loaded.unknown_words("the old cat <unk> cat<unk> <unk>") == ["cat<unk>"]
    assert loaded.start("zebra").num_unknown == 1
    assert torch.equal(loaded.log_prob("zebra"), loaded.log_prob("gnu"))


def test_generation_equals_that_of_the_command(run: Path, printed: Printed) -> None:
    (text,) = lm.load(run).generate("the cat", num_tokens=12, seed=3, temperature=0.7)
    arguments = ["--prompt=the cat", "--tokens=12", "--temperature=0.7", "--seed=3"]
    assert printed("generate", run, *arguments) == f"the cat{text}\n"
    assert len(set(lm.load(run).generate(num_tokens=9, num_samples=3))) == 3
    sizes: Any = {"num_tokens": np.int64(12), "seed": np.int64(3)}
    assert lm.load(run).generate("the cat", temperature=np.float64(0.7), **sizes) == [text]


def test_words_that_a_call_excludes_are_added_to_unknown_ones(lstm_run: Path) -> None:
    loaded = lm.load(lstm_run)
    drawn = loaded.generate(num_tokens=30, num_samples=99, excluded=[loaded.eos_id])
    assert not any("<unk>" in text or "\n" in text for text in drawn)
    drawn = loaded.generate(num_tokens=30, num_samples=99, excluded=[loaded.eos_id], allow_unk=True)
    assert any("<unk>" in text for text in drawn)


def test_independent_sequences_end_as_in_the_command(letters: Train, printed: Printed) -> None:
    run = letters("ends", "--data.sequences=independent", "--data.predict_eos=true")
    found = lm.load(run).generate("aab", num_tokens=20, num_samples=9, stop=["d"])
    arguments = ["--prompt=aab", "--tokens=20", "--samples=9", "--stop=d"]
    assert printed("generate", run, *arguments).splitlines() == [f"aab{text}" for text in found]


def test_items_without_an_end_have_no_score_of_it(items_run: Path) -> None:
    loaded = lm.load(items_run)
    item = loaded.tokenizer.token(5)
    expected = -loaded.log_prob()[5].item() / math.log(2)  # bits
    assert loaded.surprisal([item]).surprisal[0] == pytest.approx(expected, rel=1e-5)
    for call in (lambda: loaded.score([item]), lambda: loaded.surprisal([item], eos=True)):
        with pytest.raises(ValueError, match="has items, but no end of a sequence"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.step(m.start(), ""), "'' has no token"),
        (lambda m: m.candidate_log_prob("", [-1]), "token id -1 is outside the vocabulary of .*"),
        (lambda m: m.word(m.vocab_size), "token id .* is outside the vocabulary of .*"),
        (lambda m: m.start([m.vocab_size]), "token id .* is outside the vocabulary of .*"),
        (lambda m: m.step_many([m.start()], ["a", "b"]), "expected a word for each state, got 1.*"),
        (lambda m: m.step_many([m.start()] * 3, "the"), "expected a list of words, got 'the'"),
        (lambda m: m.candidate_log_prob("the", "fox"), "expected a list of words, got 'fox'"),
        (lambda m: m.score("the fox"), "expected a list of sentences, got 'the fox'"),
        (lambda m: m.score([None]), "expected text, got None"),
        (lambda m: m.score(["a\nb"]), r"expected sentences of one line each, got 'a\\nb'"),
        (lambda m: m.step(None, "the"), "expected a state of this model, got None"),
        *(
            (lambda m, word=word: m.step(m.start(), word), "expected text or token ids, got .*")
            for word in (None, b"fox", ["fox"])
        ),
        (lambda m: m.log_prob(b"fox"), "expected a list of tokens or items, got b'fox'"),
        (lambda m: m.start([None]), r"expected text or token ids, got \[None\]"),
        (lambda m: m.encode("a \udcff"), r"the text 'a \\udcff' is not valid Unicode"),
        (lambda m: m.unknown_words("a \udcff"), r"the text 'a \\udcff' is not valid Unicode"),
        (lambda m: m.generate(None), "expected text, got None"),
        (lambda m: m.step_many(m.start(), ["the"]), "expected a list of states, got State.*"),
        (lambda m: m.candidate_log_probs(m.start(), ["a"]), "expected a list of states, got .*"),
        (lambda m: m.candidate_log_probs(["the"], ["a"]), "expected a state of this model, got .*"),
        (lambda m: m.generate(num_tokens="5"), "the number of tokens must be an integer, got '5'"),
        (lambda m: m.topk(exclude="all"), "exclude must be nothing, seen or a list, got 'all'"),
        (lambda m: m.generate(num_samples=0), "the number of samples must be at least 1, got 0"),
        (lambda m: m.generate(seed=None), r"seed must be within -2\^63 … 2\^64 - 1, got None"),
        (lambda m: m.generate(seed=-(1 << 63) - 1), "seed must be within .*, got -922.*"),
        (lambda m: m.generate(seed=1 << 64), "seed must be within .*, got 18446744073709551616"),
        (lambda m: m.search(num_beams="2"), "the number of beams must be an integer, got '2'"),
        (lambda m: m.search(length_penalty=math.nan), "length_penalty must be within ±10, got nan"),
        (lambda m: m.search(num_beams=0), "the number of beams must be at least 1, got 0"),
        (lambda m: m.generate(excluded=None), "excluded must be a list of token ids, got None"),
        (lambda m: m.generate(stop=None), "stop must be a list of strings, got None"),
        (lambda m: m.generate(tokens=10), "generate has no argument tokens; its .*num_tokens.*"),
        (lambda m: m.perplexity(""), "text: there is no line to evaluate"),
    ],
)
def test_mistakes_are_named(lstm_run: Path, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(lm.load(lstm_run))


def test_a_state_of_another_model_is_refused(lstm_run: Path, transformer_run: Path) -> None:
    state = lm.load(lstm_run).start("the")
    assert lm.load(lstm_run).step(state, "cat").state.num_tokens == 2
    with pytest.raises(ValueError, match=r"^expected a state of this model, got State\(.*\)$"):
        lm.load(transformer_run).step(state, "cat")


@pytest.mark.parametrize("spelled", [False, True])
def test_all_ways_to_score_agree_if_unknown_words_are_told_apart(run: Path, spelled: bool) -> None:
    plain, num_unseen = lm.load(run), 7
    size = None if spelled else plain.vocab_size - 1 + num_unseen
    apart = lm.load(run, vocabulary_size=size, open_vocabulary=spelled)
    plain.model.double()
    apart.model.double()
    sentence, phrase = "the zebra sees <unk> gnu", "zebra gnu"  # the latter has two tokens
    words: list[Word] = [*sentence.split(), apart.eos_id]
    spelling = TrainedRun(run).speller.log_prob(["zebra", "<unk>", "gnu"]).tolist()
    shares = spelling if spelled else [-math.log(num_unseen)] * 3
    of_unknown: dict[Word, float] = dict(zip(["zebra", "<unk>", "gnu"], shares, strict=True))
    (score,), (before,) = apart.score([sentence]), plain.score([sentence])
    added = [of_unknown.get(word, 0.0) for word in words]
    assert score.log_prob == pytest.approx(before.log_prob + added, abs=1e-12)
    assert score.is_oov.tolist() == [word in of_unknown for word in words]
    state = apart.start()
    for word, expected in zip(words, score.log_prob, strict=True):
        (several,) = apart.step_many([state], [phrase])
        found = apart.candidate_log_probs([state, state], [word, phrase])[1].tolist()
        assert found == pytest.approx([expected, several.log_prob], abs=1e-12)
        (single,) = apart.candidate_log_prob(state, [word])
        assert float(single) == pytest.approx(expected, abs=1e-12)
        if not spelled:
            whole = apart.log_prob(state)
            assert float(whole[apart.id(word)]) == pytest.approx(expected, abs=1e-12)
            total = whole.exp().sum() + (num_unseen - 1) * whole[apart.unk_id].exp()
            assert float(total) == pytest.approx(1, abs=1e-12)
        log_prob, state = apart.step(state, word)
        assert log_prob == pytest.approx(expected, abs=1e-12)
    by_id = [model.step(model.start(), model.unk_id).log_prob for model in (apart, plain)]
    assert by_id[0] == pytest.approx(by_id[1] + (0 if spelled else shares[0]), abs=1e-12)


def test_log_probabilities_have_at_least_fp32_whatever_the_parameters_have(lstm_run: Path) -> None:
    loaded = lm.load(lstm_run)
    loaded.model.bfloat16()
    state, phrase = loaded.start("the"), "cat sees a dog"
    found = loaded.candidate_log_probs([state], [phrase, "cat"])
    assert found.dtype == torch.float32
    steps = loaded.step_many([state, state], [phrase, "cat"])
    assert found[0].tolist() == pytest.approx([step.log_prob for step in steps], rel=1e-6)


def test_a_vocabulary_size_leaves_texts_and_their_perplexity_unchanged(run: Path) -> None:
    plain, shared = lm.load(run), lm.load(run, vocabulary_size=1_000_000)
    assert shared.perplexity(SENTENCE) == plain.perplexity(SENTENCE)
    assert shared.generate("the", seed=2) == plain.generate("the", seed=2)
    assert shared.search("the", num_tokens=5) == plain.search("the", num_tokens=5)
    for size in (3, "9", 2.5):
        with pytest.raises(UserError, match=rf"^vocabulary size {size}: expected at least "):
            lm.load(run, vocabulary_size=size)  # type: ignore[arg-type]


def test_results_are_of_classes_of_the_package_and_printed_without_numbers(lstm_run: Path) -> None:
    model = lm.load(lstm_run, device=torch.device("cpu"))
    assert repr(model) == f"LoadedModel('{lstm_run}', lstm, {model.vocab_size} words)"
    assert repr(model.start("the zebra")) == "State(num_tokens=2, num_unknown=1)"
    step = model.step(model.start(), "the")
    assert isinstance(step, lm.Step)
    assert isinstance(step.state, lm.State)
    assert isinstance(model.score(["the"])[0], lm.LineScore)
    with pytest.raises(AttributeError, match="'lm' has no attribute 'Steps'"):
        _ = lm.Steps


@pytest.mark.parametrize(
    ("options", "word", "warns"),
    [
        ({}, "zebra", True),
        ({}, "the zebra", True),
        ({}, "<unk>", True),
        ({}, None, True),
        ({}, "the", False),
        ({"open_vocabulary": True}, "zebra", False),
        ({"open_vocabulary": True}, None, True),
        ({"vocabulary_size": 1000}, "zebra", False),
        ({"vocabulary_size": 1000}, None, False),
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda model, word: model.step(model.start("the"), word),
        lambda model, word: model.step_many([model.start("the")], [word]),
        lambda model, word: model.candidate_log_prob("the", [word]),
        lambda model, word: model.candidate_log_probs([model.start("the")], [word]),
    ],
)
def test_a_word_with_the_probability_of_all_unknown_ones_warns_once(
    lstm_run: Path, ask: Any, options: dict[str, Any], word: str | None, warns: bool
) -> None:
    loaded = lm.load(lstm_run, **options)
    word_or_id = loaded.unk_id if word is None else word
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask(loaded, word_or_id)
        ask(loaded, word_or_id)
    assert {each.filename for each in caught} <= {__file__}
    found = [str(each.message) for each in caught]
    expected = f"{word or '<unk>'!r} is given the probability of all unknown words together"
    assert [message.startswith(expected) for message in found] == [True] * warns


def test_ids_and_words_are_converted(lstm_run: Path) -> None:
    loaded = lm.load(lstm_run)
    for id in range(loaded.vocab_size):
        assert loaded.word(id) == loaded.tokenizer.token(id)
        if id not in (loaded.eos_id, loaded.unk_id):
            assert loaded.id(loaded.word(id)) == id
    assert loaded.id("zebra") == loaded.unk_id
    with pytest.raises(ValueError, match="'the cat' has 2 tokens, not one"):
        loaded.id("the cat")


def test_masks_and_tables_are_no_lists_of_words(lstm_run: Path) -> None:
    loaded = lm.load(lstm_run)
    excluded = [loaded.id(word) for word, _ in loaded.topk("the", 2)]
    wrong: list[Any] = [torch.zeros(loaded.vocab_size, dtype=torch.bool), [True], np.array([False])]
    right: list[Any] = [excluded, np.array(excluded), torch.tensor(excluded)]
    for ids in right:
        assert loaded.topk("the", 1, exclude=ids) == loaded.topk("the", 3)[2:]
    for mask in wrong:
        with pytest.raises(ValueError, match=r"expected text or token ids, got .*(Fals|Tru)e"):
            loaded.topk("the", 3, exclude=mask)
        with pytest.raises(ValueError, match=r"expected text or token ids, got .*(Fals|Tru)e"):
            loaded.candidate_log_prob("the", mask)
    with pytest.raises(ValueError, match="expected a list of sentences, got array"):
        loaded.score(np.array([["the cat"]]))


def test_help_explains_every_figure() -> None:
    for figures in (Evaluation, lm.LineScore):
        text = pydoc.render_doc(figures, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
        for each in fields(figures):
            assert re.search(rf"\n \|  +{each.name}: [a-z\[]", text), each.name


def test_every_file_of_a_run_is_described(lstm_run: Path) -> None:
    page = (Path(lm.__file__).parent / "training" / "README.md").read_text()
    found = [path.name for path in lstm_run.rglob("*") if path.is_file()]
    assert len(found) > 10
    for name in found:
        name = re.sub("evaluate-.*.json", "evaluate-SPLIT.json", name)
        assert re.search(rf"[`/]{re.escape(name)}`", page), name
