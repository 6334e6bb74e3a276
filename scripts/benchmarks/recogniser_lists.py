"""N-best lists and lattices of a real speech recogniser, and what rescoring gains on them.

`text` prints the sentences of books as they are spoken: lower case, letters and apostrophes. Train
on them: `lm new`, `lm train`. `lists` makes speech of sentences (flite, three voices, white noise),
decodes it (pocketsphinx with its English model), and writes for `tune` and `report`: a folder of
lattices, an n-best list with acoustic and first-pass scores apart, and references. `table` tunes
and reports word error rates on such a folder. The hypotheses are those of a search in the lattices
with the trigram model and the weights of pocketsphinx; the first one is its first pass.

The sentences of `lists` are drawn from a text: give one that no model was trained on.
"""

import importlib
import math
import random
import re
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from lm.rescoring.lattice import read_lattices
from lm.rescoring.lattice_search import Words, search
from lm.rescoring.models import NUM_UNSEEN, ArpaScores, WordScores
from lm.rescoring.nbest import Floats
from lm.rescoring.utterances import Utterances
from lm.rescoring.weights import ScoredList, Weights, tune
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.ngram import NGramModel
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser

VOICES = ("slt", "rms", "awb")
RATE = 16_000
"""Samples per second, of flite's voices and of pocketsphinx's model."""
LISTS = ("tune", "report")
_END = re.compile(r"(?:^| )[.?!;:](?= |$)")
_OTHER = re.compile(r"[^a-z' .,\"()]")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def sentences(lines: Iterable[str]) -> Iterator[list[str]]:
    """The spoken words of sentences of a tokenized text, without those that have other characters.

    Example:
        >>> list(sentences(['" Well-known ! " he said . It was 1812 .']))
        [['well', 'known'], ['he', 'said']]
    """
    for line in lines:
        for part in _END.split(line.lower()):
            sentence = part.replace("-", " ")
            if not _OTHER.search(sentence):
                words = [word for word in sentence.split() if _WORD.fullmatch(word)]
                if words:
                    yield words


class Step(NamedTuple):
    """What follows from a word."""

    state: Words  # the last two words


class FirstPass:
    """The trigram model of a pocketsphinx decoder, as a `WordModel`."""

    eos_id = 0

    def __init__(self, decoder: Any) -> None:
        self._model = decoder.get_lm(decoder.current_search())
        self._nats = math.log(decoder.config["logbase"])

    def start(self) -> Words:
        """The state before the first word."""
        return ("<s>",)

    def step_many(self, states: Sequence[Words], words: Sequence[str]) -> list[Step]:
        """The state after each pair of a state and a word."""
        return [Step((*state, word)[-2:]) for state, word in zip(states, words, strict=True)]

    def candidate_log_probs(self, states: Sequence[Words], words: Sequence[str | int]) -> Floats:
        """Log-probabilities [S, K] of some next words, 0 for `</s>`, after each state."""
        names = [word if isinstance(word, str) else "</s>" for word in words]
        rows = [[self._model.prob([name, *reversed(state)]) for name in names] for state in states]
        return np.array(rows) * self._nats

    def log_prob(self, words: Words) -> float:
        """Log-probability in nats of the words of a line and of its end."""
        total, state = 0.0, self.start()
        for word in words:
            total += float(self.candidate_log_probs([state], [word])[0, 0])
            state = (*state, word)[-2:]
        return total + float(self.candidate_log_probs([state], [self.eos_id])[0, 0])


def speech(words: Sequence[str], voice: str, snr: float, seed: int) -> NDArray[np.int16]:
    """Samples of a voice with white noise, `snr` decibels below it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        command = ["flite", "-voice", voice, "-t", " ".join(words), "-o", str(path)]
        subprocess.run(command, check=True)
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(float)
    level = samples.std() * 10 ** (-snr / 20)
    noise = np.random.default_rng(seed).normal(0, level, len(samples))
    return (samples + noise).clip(-32768, 32767).astype(np.int16)


def write_lists(
    folder: Path, spoken: dict[str, list[str]], *, snr: float, num_hypotheses: int, name: str
) -> None:
    """Speak, decode, and write the lattices, the n-best list and the references of sentences."""
    if shutil.which("flite") is None:
        raise UserError("`lists` requires the program flite: apt-get install flite")
    try:
        sphinx = importlib.import_module("pocketsphinx")
    except ImportError as error:
        raise UserError("`lists` requires pocketsphinx: pip install '.[recogniser]'") from error
    decoder = sphinx.Decoder(sphinx.Config(samprate=float(RATE), loglevel="FATAL"))
    model, config = FirstPass(decoder), decoder.config
    weights = Weights(lm_weight=config["bestpathlw"], insertion_penalty=-math.log(config["wip"]))
    lattices = folder / f"{name}-lattices"
    lattices.mkdir(parents=True, exist_ok=True)
    rows, references = [], []
    for number, (id, words) in enumerate(spoken.items()):
        samples = speech(words, VOICES[number % len(VOICES)], snr, seed=number)
        decoder.start_utt()
        decoder.process_raw(samples.tobytes(), full_utt=True)
        decoder.end_utt()
        if (found := decoder.get_lattice()) is None:
            continue  # nothing was recognised
        path = lattices / f"{id}.slf"
        found.write_htk(str(path))
        (lattice,) = read_lattices(str(path), list(read_text(str(path))))
        paths = search(lattice, weights, num_hypotheses, [model])
        rows += [
            f"{id}\t{path.acoustic:.4f}\t{model.log_prob(hypothesis):.4f}\t{' '.join(hypothesis)}\n"
            for hypothesis, path in paths
        ]
        references.append(f"{id} {' '.join(words)}\n")
    (folder / f"{name}.nbest").write_text("".join(rows), encoding="utf-8")
    (folder / f"{name}.ref").write_text("".join(references), encoding="utf-8")
    print(f"{name}: {len(references)} utterances, {len(rows)} hypotheses")


def draw(lines: Iterable[str], number: int, seed: int) -> list[list[str]]:
    """Sentences of 5 to 20 words, without repeats."""
    every = {" ".join(words) for words in sentences(lines) if 5 <= len(words) <= 20}
    if len(every) < number:
        raise UserError(f"the text has {len(every)} sentences of 5 to 20 words, not {number}")
    return [text.split() for text in random.Random(seed).sample(sorted(every), number)]


class SharedScores:
    """A run's scores of the words of some texts, computed once for any number U of unseen words."""

    def __init__(self, folder: Path, texts: Iterable[str]) -> None:
        opened = TrainedRun.open(folder)
        scorer = Scorer.of(opened)
        distinct = list(dict.fromkeys(texts))
        self.vocab_size = opened.model.vocab_size
        self._scores = dict(zip(distinct, scorer.sentences(distinct), strict=True))

    def shared_among(self, num_unseen: int) -> WordScores:
        """The scores in which P(`<unk>`) is shared among U words."""
        share = math.log(num_unseen)

        def word_scores(texts: Sequence[str]) -> list[Floats]:
            found = [self._scores[text] for text in texts]
            return [score.log_prob - share * score.is_oov for score in found]

        return word_scores


def list_path(folder: Path, name: str) -> str:
    """An n-best list of a folder, which may be compressed."""
    for path in (folder / f"{name}.nbest", folder / f"{name}.nbest.xz"):
        if path.exists():
            return str(path)
    raise UserError(f"{folder} has no {name}.nbest")


def add_rows(table: Table, folder: Path, run_dir: Path, arpa: Path | None, fixed: float) -> None:
    """Add a row for each way to choose from the lists of a folder."""
    tuned, report = (
        Utterances.read(list_path(folder, name), str(folder / f"{name}.ref")) for name in LISTS
    )
    assert tuned.errors is not None
    assert report.errors is not None
    scores = SharedScores(run_dir, [*tuned.nbest.texts, *report.nbest.texts])
    ways: dict[str, list[WordScores]] = {
        f"run, tuned, U = {unseen:,}": [scores.shared_among(unseen)]
        for unseen in (1, 100, 10_000, 100_000, NUM_UNSEEN, 10_000_000)
    }
    if arpa is not None:
        ngram, known = NGramModel(arpa), scores.vocab_size - 1
        size = max(known, ngram.num_known) + NUM_UNSEEN
        run, shared = scores.shared_among(size - known), ArpaScores(ngram, size)
        ways |= {"n-gram model, tuned": [shared], "run and n-gram model, tuned": [run, shared]}
        ways["the same, n-gram model with U = 1"] = [run, ArpaScores(ngram)]
    plain = Weights(lm_weight=fixed)
    scored = ScoredList(report.nbest, [scores.shared_among(NUM_UNSEEN)])
    figures = report.errors.report(report.nbest, scored.choose(scored.totals(plain)))
    common = {"lists": folder.resolve().name, "vocab_size": scores.vocab_size}
    common |= {name: figures[name] for name in ("utterances", "hypotheses", "words")}
    table.add(common | {"row": "first pass", "wer": figures["wer_before"]})
    table.add(common | {"row": f"run, LM weight {fixed:g}"} | _rates(figures))
    for title, models in ways.items():
        lists = [ScoredList(each.nbest, models) for each in (tuned, report)]
        weights = tune(lists[0], tuned.errors)
        chosen = [each.choose(each.totals(weights)) for each in lists]
        development = tuned.errors.report(tuned.nbest, chosen[0])
        figures = report.errors.report(report.nbest, chosen[1])
        row = {"row": title, "development": development["wer_after"], **vars(weights)}
        row["mixture"] = weights.mixture if len(models) > 1 else None
        table.add(common | row | _rates(figures))
    table.add(common | {"row": "oracle", "wer": figures["wer_oracle"]})


def _rates(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: figures[f"wer_{full}"]
        for name, full in (("wer", "after"), ("low", "after_low"), ("high", "after_high"))
    }


def main() -> None:
    """Print sentences, write lists, or print the table."""
    parser = benchmark_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="print the sentences of texts, one a line")
    text.add_argument("texts", nargs="+", help="tokenized texts, which may be compressed")
    text.add_argument("--words", type=int, default=4_000_000, help="at most")
    lists = commands.add_parser("lists", help="write lists of spoken sentences")
    lists.add_argument("text", help="tokenized text")
    lists.add_argument("folder", type=Path, help="folder to write")
    lists.add_argument("--utterances", type=int, default=60, help="of each list")
    lists.add_argument("--hypotheses", type=int, default=50, help="at most, of each utterance")
    lists.add_argument("--snr", type=float, default=35.0, help="decibels")
    lists.add_argument("--seed", type=int, default=1)
    table = commands.add_parser("table", help="word error rates on such lists")
    table.add_argument("run_dir", type=Path, metavar="RUN")
    table.add_argument("folder", type=Path)
    table.add_argument("--arpa", type=Path)
    table.add_argument("--lm-weight", type=float, default=10.0, help="of the row without tuning")
    options = parser.parse_args()
    if options.command == "text":
        num_words = 0
        for words in sentences(line for name in options.texts for line in read_text(name)):
            if (num_words := num_words + len(words)) > options.words:
                return
            print(" ".join(words))
    elif options.command == "lists":
        size = options.utterances
        drawn = draw(read_text(options.text), 2 * size, options.seed)
        for name, part in zip(LISTS, (drawn[:size], drawn[size:]), strict=True):
            spoken = {f"{name}{number:04d}": words for number, words in enumerate(part)}
            limits = {"snr": options.snr, "num_hypotheses": options.hypotheses}
            write_lists(options.folder, spoken, name=name, **limits)
    else:
        columns = {"row": "{row}", "WER, %": "{wer:.2f}", "95 %": "{low:.1f} … {high:.1f}"}
        columns |= {"on the tuning list": "{development:.2f}", "λ": "{mixture:.2f}"}
        printed = Table(columns, options.json)
        add_rows(printed, options.folder, options.run_dir, options.arpa, options.lm_weight)


if __name__ == "__main__":
    run(main)
