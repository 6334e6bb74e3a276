"""Ranking: the figures by brute force, what is excluded, and counts."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lm
from data_prep.corpus.reader import read_lines
from data_prep.errors import UserError
from data_prep.sequences import Sequences, find_sequences
from lm.cli import main
from lm.evaluation import evaluate, evaluate_split, evaluate_text
from lm.figures import TextCounts
from lm.model import reader
from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from lm.run import TrainedRun
from lm.scoring import ranking
from lm.scoring.ranking_figures import Predictions, popularity_groups, ranking_figures
from tests.conftest import OTHER_LETTERS, Printed, Train
from tests.data_prep.conftest import write_table
from tests.models import log_probs, small_model

N, EOS, UNK = 23, 0, 1
KS = (1, 3, 10)


def make(backbone: str) -> LanguageModel:
    return small_model(ClassTree.two_level(torch.arange(N) % 4), backbone)


def some_sequences() -> Sequences:
    rng = np.random.default_rng(4)
    lines = [rng.integers(1, N, size=rng.integers(1, 15)) for _ in range(30)]
    known = np.array([rng.integers(len(line) + 1) for line in lines])
    tokens = np.concatenate([np.append(line, EOS) for line in lines])
    return find_sequences(tokens, eos_id=EOS, unk_id=UNK, num_known=known)


def distributions(model: LanguageModel, line: list[int]) -> np.ndarray:
    """P of the next word after each item of a sequence, and before the first."""
    return log_probs(model, [EOS, *line]).exp().numpy()


def counted(pairs: np.ndarray, counts: np.ndarray, line: list[int]) -> np.ndarray:
    """Numbers of times that items followed each item of a sequence; of events before the first."""
    return np.array([pairs[word] + counts / counts.sum() for word in [EOS, *line]])


def by_hand(scores: Callable[..., Any], sequences: Sequences, exclude: str) -> dict[str, Any]:
    """Figures by the definitions, one prediction after another, and the rank of each target."""
    ranks, expected, recommended = [], [], set()
    for line, known in zip(sequences.lines(), sequences.num_known, strict=True):
        probs = scores(line.tolist())
        for place in range(known, len(line)):
            p = probs[place].copy()
            p[[EOS, UNK]] = 0
            if exclude == "seen":
                p[line[:place]] = 0
            p /= p.sum()
            order = np.argsort(-p, kind="stable")
            target = line[place]
            ranks.append(1 + order.tolist().index(target) if p[target] > 0 else math.inf)
            expected.append([p[order[:k]].sum() for k in KS])
            recommended |= {(k, int(word)) for k in KS for word in order[:k] if p[word] > 0}
    rank, total = np.array(ranks), len(ranks) + int(sequences.num_left_out.sum())
    ranked = np.isfinite(rank)
    return {
        "rank": ranks,
        "mrr": (1 / rank).sum() / total,
        "hit_rate": [(rank <= k).sum() / total for k in KS],
        "ndcg": [(1 / np.log2(1 + rank[rank <= k])).sum() / total for k in KS],
        "expected_hit_rate": np.array(expected)[ranked].mean(0).tolist(),
        "observed_hit_rate": [(rank[ranked] <= k).mean() for k in KS],
        "coverage": [sum(each == k for each, _ in recommended) / (N - 2) for k in KS],
    }


def predicted(model: LanguageModel, lines: Sequences, exclude: Any, way: Any = None) -> Predictions:
    ways = [way or ranking.rank_by_model(model, [EOS, UNK])]
    (found,) = ranking.predict(model, lines, ways, eos_id=EOS, ks=KS, exclude=exclude)
    return found


@pytest.mark.parametrize("way", ["lstm", "transformer", "equal", "popularity", "last item"])
@pytest.mark.parametrize("exclude", ["nothing", "seen"])
def test_figures_are_as_defined(way: str, exclude: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = make(way if way == "transformer" else "lstm"), some_sequences()
    scores, ranker = partial(distributions, model), None
    for parameter in model.output.parameters() if way == "equal" else ():
        parameter.data.zero_()  # items with equal probabilities are ranked by their ids
    if way in ("popularity", "last item"):
        rng, pairs = np.random.default_rng(1), np.zeros((N, N))
        counts = np.append([90, 0], rng.integers(3, 9, N - 2))  # as many <eos> as others
        lines = [rng.integers(2, N, size) for size in (0, 1, 99, 2)] if way == "last item" else []
        for line in lines:
            np.add.at(pairs, (line[:-1], line[1:]), 1)
        scores = partial(counted, pairs, counts * (np.arange(N) != EOS))
        ranker = ranking.rank_by_counts(counts, [EOS, UNK], lines)
    truth = by_hand(scores, sequences, exclude)
    for block, at_once in ((1, 4), (100 * N, 2048)):  # a sequence is read in one or more chunks
        monkeypatch.setattr(ranking, "BLOCK_ELEMENTS", block)
        monkeypatch.setattr(reader, "BATCH_TOKENS", at_once)
        every = predicted(model, sequences, exclude, ranker)
        assert every.rank[every.sequence.argsort(kind="stable")].tolist() == truth["rank"]
        found = ranking_figures(every, sequences, KS, np.r_[-1, -1, np.zeros(N - 2)])
        assert found.mrr == pytest.approx(truth["mrr"])
        for name in truth.keys() - {"rank", "mrr"}:
            assert [getattr(each, name) for each in found.at] == pytest.approx(truth[name]), name
    assert sequences.num_left_out.sum() > 0


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
def test_perplexity_is_that_of_the_items_to_predict(backbone: str) -> None:
    model, sequences = make(backbone), some_sequences()
    options: Any = {"eos_id": EOS, "unk_id": UNK, "context": 6, "sequences": sequences}
    found = evaluate(model, sequences.tokens, TextCounts(words=1, lines=1, utf8_bytes=1), **options)
    nll = [
        -math.log(distributions(model, line.tolist())[place, line[place]])
        for line, known in zip(sequences.lines(), sequences.num_known, strict=True)
        for place in range(known, len(line))
    ]
    assert found.tokens == len(nll)
    assert found.oov == sequences.num_left_out.sum() > 0
    assert found.perplexity == pytest.approx(math.exp(np.mean(nll)))
    assert found.unit == "item"


def test_sequences_without_a_known_item_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_TOKENS", 4)
    sequences = find_sequences(np.array([*[UNK, EOS] * 9, 5, EOS]), eos_id=EOS, unk_id=UNK)
    found = predicted(make("lstm"), sequences, "nothing")
    assert (found.sequence.tolist(), found.target.tolist()) == ([9], [5])


def test_groups_of_popularity_have_equal_shares_of_the_events() -> None:
    counts = np.array([900, 5, 30, 10, 10, 10, 10, 6, 6, 8])
    assert popularity_groups(counts, [0, 1]).tolist() == [-1, -1, 0, 1, 1, 1, 2, 2, 2, 2]


def test_report_of_a_run(items_run: Path, printed: Printed) -> None:
    command = ["evaluate", items_run, "--ranking", "--k", "5", "1", "--exclude=seen"]
    values, table = json.loads(printed(*command, "--json")), printed(*command)
    assert json.loads((items_run / "evaluate-test-ranking-seen.json").read_text()) == values
    run = TrainedRun(items_run, "cpu")
    assert (values["items"], values["unknown_targets"]) == (20, 1)
    sequences = run.prepared.sequences("test")
    assert values["predictions"] == values["users"] == len(sequences.begin)
    assert f"HR@5        {values['model']['at'][1]['hit_rate']:8.4f}" in table
    assert f"  observed  {values['model']['at'][1]['observed_hit_rate']:8.4f}" in table
    ndcg = {name: values[name]["at"][-1]["ndcg"] for name in ("model", "popularity", "last_item")}
    above = [name.replace("_", " ") for name in ndcg if ndcg[name] > ndcg["model"]]
    below = f"the model is below {' and '.join(above)} in NDCG@"
    assert (below in table) == bool(above) == ("the model is below" in table)
    # Counts: the items of training that the user has not had, by the last one, then by events.
    counts, size = run.prepared.counts().copy(), run.prepared.vocab_size
    counts[[run.prepared.eos_id, run.prepared.unk_id]] = -1
    pairs = np.zeros((size, size))
    for line in run.prepared.sequences("train").lines():
        np.add.at(pairs, (line[:-1], line[1:]), counts.sum())
    for name, times in (("popularity", 0), ("last_item", 1)):
        hits = 0
        for line, num_predicted in zip(sequences.lines(), sequences.num_predicted, strict=True):
            had = line[: len(line) - num_predicted]
            left = counts + times * pairs[had[-1]]
            left[had] = -1
            best = np.argsort(-left, kind="stable")[:5].tolist()
            hits += num_predicted == 1 and int(line[-1]) in best
        assert values[name]["at"][1]["hit_rate"] == hits / len(sequences.begin)


@pytest.mark.parametrize("exclude", ["nothing", "seen"])
def test_recommended_items_are_the_most_probable_ones(
    exclude: Any, items_run: Path, tmp_path: Path, printed: Printed
) -> None:
    users = [["item 3", "item 4", "unheard of"], [], ["item 19"] * 3, ["item 7"]]
    path = tmp_path / "users.txt"
    path.write_text("\n".join([*map(json.dumps, users), "unheard of"]) + "\n")
    command = ["recommend", items_run, f"--history={path}", "--k=4", f"--exclude={exclude}"]
    found = list(map(json.loads, printed(*command, "--json").splitlines()))
    lines = printed(*command).splitlines()
    assert found.pop() == found[1] | {"unknown": ["unheard", "of"]}
    assert lines.pop() == lines[1]
    model = lm.load(items_run, device="cpu")
    for items, values, line in zip(users, found, lines, strict=True):
        known = [item for item in items if item != "unheard of"]
        ids = list(map(model.id, known))
        log_prob = model.log_prob(known)
        probs = log_prob.exp()
        probs[[model.eos_id, model.unk_id, *(ids if exclude == "seen" else ())]] = 0
        best = probs.sort(descending=True, stable=True)
        names = list(map(model.word, best.indices[:4].tolist()))
        candidates = model.candidate_log_prob(model.start(known), names)
        torch.testing.assert_close(candidates, log_prob[best.indices[:4]])
        assert values["items"] == names
        assert values["probabilities"] == pytest.approx(best.values[:4].tolist(), rel=1e-4)
        assert line.startswith(f"{names[0]} ({best.values[0]:.4f})\t{names[1]} (")
        assert values["unknown"] == [item for item in items if item == "unheard of"]
        same = model.topk(known, 4, exclude=exclude)
        assert [item for item, _ in same] == names
        values = best.values[:4].log().tolist()
        assert [log_prob for _, log_prob in same] == pytest.approx(values, rel=1e-4)
    with pytest.warns(UserWarning, match=r"left out: \['unheard of'\]") as warned:
        without = model.topk(model.start(), 3, exclude=[names[0], "unheard of"])
    assert {Path(each.filename) for each in warned} == {Path(__file__)}
    assert len(without) == 3
    assert names[0] not in dict(without)
    path.with_name("retired.txt").write_text(f"{names[0]}\nunheard of\n")
    rows = printed(*command, f"--retired={path.with_name('retired.txt')}", "--json").splitlines()
    assert json.loads(rows[-2])["items"][:3] == names[1:]
    ones = {name for name, _ in model.topk([], 18) if name.startswith("item 1")}
    assert set() < ones <= {name for name, _ in model.complete([], "item 1", 18)}
    assert model.has_beginning("item 1")
    assert model.prefix_log_prob([], "item 1") > -3
    with pytest.raises(ValueError, match="a state does not have the tokens"):
        model.topk(model.start(), exclude="seen")
    with pytest.raises(ValueError, match="expected a list of items, got 'item 19'"):
        model.topk("item 19", 2)


def test_classes_show_items_as_in_their_table(items_run: Path, printed: Printed) -> None:
    shown = printed("classes", items_run, "--words=9")
    assert '"item 3"' in shown
    assert "%20" not in shown
    nodes = json.loads(printed("classes", items_run, "--json"))["nodes"]
    assert "item 3" in {word for node in nodes for word in node["top_words"]}


def test_items_outside_the_catalogue_are_counted_and_the_first_is_named(
    items_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, complaint: Printed
) -> None:
    history, retired = tmp_path / "users.txt", tmp_path / "retired.txt"
    history.write_text('["item 3"]\nitem 3\n["item 4", "Nope"]\n')
    retired.write_text("item 3\n\nitme 4\n")
    files = [f"--history={history}", f"--retired={retired}"]
    assert main(["recommend", str(items_run), *files]) == 0
    lost, nothing = "items that are not in the catalogue", "users who have no other items: 1"
    assert f"{retired}: {lost}: 1, the first is 'itme 4'" in caplog.text
    left = f"{lost}, left out"
    assert f"{history}: {left}: 3, the first is 'item' in line 2; {nothing}" in caplog.text
    catalogue = [f"item {number}" for number in range(20)]
    for items, problem in (
        (catalogue, f"--retired {retired}: it has all items of the catalogue"),
        (catalogue[1:], "--k 10: k must be within 1 … 1, the number of items that are not retired"),
    ):
        retired.write_text("\n".join(items))
        assert complaint("recommend", items_run, *files) == problem
    rows = [{"user": "u7", "item": item, "time": 1} for item in ("item 3", "Nope")]
    for name in ("a.parquet", "a.json"):
        write_table(tmp_path / name, rows)
        assert main(["recommend", str(items_run), f"--events={tmp_path / name}"]) == 0
        assert caplog.messages[-1].endswith("left out: 1, the first is 'Nope' of user 'u7'")
    (table := tmp_path / "events.csv").write_text("user,item,time\nu7,item 3,1\nu8,Nope,2\n")
    assert main(["recommend", str(items_run), f"--events={table}"]) == 0
    assert caplog.messages[-1] == f"{table}: {left}: 1, the first is 'Nope' of user 'u8'; {nothing}"


def test_ends_of_sequences_are_predicted_and_are_no_items(letters: Train, printed: Printed) -> None:
    run = letters("ends", "--data.sequences=independent", "--data.predict_eos=true")
    values = json.loads(printed("evaluate", run, "--ranking", "--json", "--k=1"))
    items = [line.split() for line in OTHER_LETTERS]
    assert values["predictions"] == sum(map(len, items))
    assert values["users"] == sum(map(bool, items))
    assert values["excluded_targets"] == 0
    assert json.loads(printed("evaluate", run, "--json"))["tokens"] == (
        values["predictions"] - values["unknown_targets"] + len(items)
    )
    drawn = json.loads(printed("generate", run, "--tokens=200", "--temperature=9", "--json"))
    assert "\n" not in drawn["samples"][0]


def test_unknown_items_of_a_prompt_are_left_out(
    items_run: Path, printed: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ('["item 3", "item 4"]', '["item 3", "Nope 1", "item 4", "Nope 1"]')
    texts = [printed("generate", items_run, f"--prompt={each}", "--tokens=5") for each in prompts]
    assert texts[0] == texts[1]
    assert texts[0].startswith('["item 3", "item 4", "item ')
    problem = "items of the prompt that are not in the catalogue, left out: Nope 1"
    assert caplog.messages == [problem]


def test_unknown_items_are_left_out_of_texts_that_are_scored_or_continued(
    letters: Train, printed: Printed, tmp_path: Path
) -> None:
    run = letters("ends", "--data.sequences=independent", "--data.predict_eos=true")
    loaded, text, known = lm.load(run), "ab zz b <unk> ba", "ab b ba"
    for call in (loaded.generate, loaded.search, lambda text: loaded.start(text).num_tokens):
        with pytest.warns(UserWarning, match=r"not in the catalogue and left out: \['zz'\]"):
            found = call(text)
        assert found == call(known)
    with pytest.warns(UserWarning, match="'zz' is not in the catalogue: its probability is 0"):
        step = loaded.step(loaded.start(), "zz")  # which leaves the state as it is
    after, expected = loaded.candidate_log_prob(step.state, ["zz", "ab"]), loaded.score([known])[0]
    probs = step.log_prob, *after.tolist()
    assert probs == (-math.inf, -math.inf, pytest.approx(expected.log_prob[0], abs=1e-5))
    score = loaded.score([text])[0]
    assert score.is_oov.tolist() == [0, 1, 0, 1, 0, 0]
    assert score.context.tolist() == [1, 2, 2, 3, 3, 4]
    entropy: Any = loaded.score([known], details=True)[0].tokens.entropy
    every = torch.special.entr(loaded.log_prob().double().exp())
    assert entropy[0] == pytest.approx(float(every.sum()), rel=1e-5)
    assert score.log_prob == pytest.approx(np.insert(expected.log_prob, [1, 2], 0), abs=1e-5)
    (path := tmp_path / "text.txt").write_text(f"{text}\nzz\n")
    values = json.loads(printed("evaluate", run, "--text", path, "--json"))
    options = "--level=summary", "--unit=nats"
    summary = json.loads(printed("score", run, path, *options, "--format=json"))["summary"]
    for name in summary.keys() & values.keys() - {"unit"}:
        assert [summary[name]] == [values[name] and pytest.approx(values[name], rel=1e-5)], name
    including, excluding, *counts = printed("score", run, path, *options).splitlines()
    assert including.split("\t")[1] == excluding.split("\t")[1] == str(summary["perplexity"])
    assert counts == [f"OOVs:\t{summary['oov']}", f"Tokens:\t{values['tokens']}"]


def test_unlearned_ends_are_not_drawn(items_run: Path, tmp_path: Path, printed: Printed) -> None:
    model = lm.load(items_run, device="cpu")
    (text,) = model.generate(num_tokens=200, temperature=9)
    assert "\n" not in text
    assert len(model.search(num_tokens=3, num_beams=99)[-1].tokens) == 3
    plain = shutil.copytree(items_run, tmp_path / "plain")
    config = (plain / "config.yaml").read_text().replace("leave_one_out", "files")
    (plain / "config.yaml").write_text(config.replace("user_field: user", "user_field: null"))
    assert printed("generate", plain, "--tokens=200", "--temperature=9").count("\n") == 1
    prompts = ("item%203 item%204", "item%203 nope item%204")
    texts = [printed("generate", plain, f"--prompt={each}", "--tokens=5") for each in prompts]
    assert texts[0] == texts[1]
    assert texts[0].startswith("item%203 item%204 item%20")


def test_a_text_of_sequences_has_the_figures_of_its_split(items_run: Path) -> None:
    run = TrainedRun(items_run, "cpu")
    lines = list(read_lines(run.config.data, "test"))
    assert lines[0].count("\t") == 1
    both = evaluate_text(run, lines, progress=False), evaluate_split(run, "test", progress=False)
    assert both[0].to_dict() == both[1].to_dict()  # without NaN
    valid = evaluate_split(run, "valid", progress=False)
    assert (valid.oov, valid.bits_per_byte) == (1, None)  # known items are not predicted
    with pytest.raises(UserError, match="an open vocabulary requires a text"):
        evaluate_text(run, lines, open_vocabulary=True)
    with pytest.raises(UserError, match="has items, which are not spelled: no open vocabulary"):
        lm.load(items_run, open_vocabulary=True)


def test_users_who_have_had_nearly_all_items_are_given_the_others(
    items_run: Path, tmp_path: Path, printed: Printed
) -> None:
    names = [f"item {k}" for k in range(20)]
    lines = map(json.dumps, (names[:3], names[1:], [*names, *names]))
    (tmp_path / "users.txt").write_text("\n".join(lines))
    command = ("recommend", items_run, f"--history={tmp_path / 'users.txt'}", "--exclude=seen")
    first, second, third = map(json.loads, printed(*command, "--k=17", "--json").splitlines())
    assert sorted(first["items"]) == sorted(names[3:])
    assert (second["items"], len(second["probabilities"])) == (names[:1], 1)
    assert (third["items"], third["probabilities"]) == ([], [])
