"""The utterances of a file: an n-best list or lattices, and their references."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.corpus.lines import read_text
from data_prep.errors import DataError, UserError
from lm.rescoring.formats import NonWords, format_of
from lm.rescoring.lattice import Lattice, read_lattices
from lm.rescoring.lattice_search import WordModel, to_nbest
from lm.rescoring.nbest import NBest, read_nbest
from lm.rescoring.references import read_references
from lm.rescoring.weights import Weights
from lm.rescoring.word_errors import WordErrors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Utterances:
    """An n-best list, or that of the first pass of lattices, and its word errors."""

    nbest: NBest
    lattices: list[Lattice]  # none of an n-best list
    errors: WordErrors | None  # with references

    @classmethod
    def read(
        cls,
        name: str,
        references: str | None,
        costs: Sequence[dict[str, float]] = (),
        *,
        non_words: NonWords | None = None,
    ) -> "Utterances":
        """Read an n-best list, a file or folder of lattices, and a file of references.

        `costs` are those of `read_nbest`; `non_words` are left out of all files.

        Raises:
            DataError: if an utterance has no reference, or all references are empty.
        """
        lattices: list[Lattice] = []
        lines = [] if (is_folder := Path(name).is_dir()) else list(_read(name))
        if is_folder or format_of(lines) != "list":
            if costs:
                raise DataError(f"{name}: files of costs belong to n-best lists in Kaldi's layout")
            lattices = read_lattices(name, lines, non_words)
            nbest = to_nbest(name, lattices)
        else:
            nbest = read_nbest(name, costs, lines=lines, non_words=non_words)
        errors = None
        if references is not None:
            said = read_references(references, nbest.ids, non_words)
            if missing := [id for id in nbest.ids if id not in said]:
                raise DataError(f"{references}: no reference for utterance {missing[0]} of {name}")
            if not any(said[id] for id in nbest.ids):
                raise DataError(f"{references}: the references have no words")
            errors = WordErrors.of([said[id] for id in nbest.ids], nbest)
            if num_unused := len(said) - len(nbest.ids):
                others = f"{num_unused:,} of {len(said):,} references have no hypotheses in {name}"
                _log.warning("%s: %s; they do not count as errors", references, others)
        return cls(nbest=nbest, lattices=lattices, errors=errors)

    @property
    def texts(self) -> list[str]:
        """The hypotheses; of lattices, the distinct words of each."""
        words = (" ".join(lattice.words) for lattice in self.lattices)
        return list(words) if self.lattices else self.nbest.texts

    def searched(
        self, weights: Weights, models: Sequence[WordModel], num_beams: int
    ) -> "Utterances":
        """The hypotheses of a search in the lattices in addition to those of the first pass."""
        nbest = to_nbest(self.nbest.name, self.lattices, weights, models, num_beams)
        errors = self.errors
        if errors is not None:
            said = [each.split() for each in errors.references]
            errors = WordErrors.of(said, nbest, errors.characters)
        return replace(self, nbest=nbest, errors=errors)


def _read(name: str) -> Iterator[str]:
    """The lines of a file, which must be text."""
    try:
        yield from read_text(name)
    except UserError as error:
        if str(error).endswith("a NUL character"):
            command = "lattice-copy ark:FILE ark,t:-"
            raise DataError(f"{error}: Kaldi's binary lattices as text: {command}") from error
        raise
