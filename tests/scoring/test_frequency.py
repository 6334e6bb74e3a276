"""Loss by frequency rank: the bins of the definition, their sum, their table."""

import json
from pathlib import Path

import numpy as np
import pytest

from lm.cli import main
from lm.run import TrainedRun
from lm.scoring import frequency
from lm.scoring.mixture import token_log_probs


def test_tokens_are_divided_by_the_rank_of_their_word_and_of_the_word_before(
    lstm_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequency, "LAST_RANKS", (3, 9, 10**9))
    assert main(["evaluate", str(lstm_run), "--by-frequency", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    run = TrainedRun.open(lstm_run)
    counts, tokens = run.prepared.counts(), np.array(run.prepared.tokens("test"))
    nll = -token_log_probs(run, tokens)
    by_count = sorted(range(len(counts)), key=lambda word: (-int(counts[word]), word))
    previous = [run.description.eos_id, *tokens[:-1].tolist()]
    for name, words in (("target", tokens.tolist()), ("previous", previous)):
        rank = np.array([1 + by_count.index(word) for word in words])
        bins = values["by_frequency"][name]
        limits = [(each["first_rank"], each["last_rank"]) for each in bins]
        assert limits == [(1, 3), (4, 9), (10, len(counts))]
        for each, (first, last) in zip(bins, limits, strict=True):
            inside = (first <= rank) & (rank <= last)
            assert 0 < each["tokens"] == inside.sum()
            assert each["nll_nats"] == pytest.approx(nll[inside].sum())
        assert sum(each["nll_nats"] for each in bins) == pytest.approx(values["nll_nats"], rel=1e-5)
