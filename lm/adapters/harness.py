"""A trained model in lm-evaluation-harness, `pip install lm_eval`.

    python -m lm.adapters.harness --model sqrtlm --model_args run=runs/mine --device cpu --tasks …

is its command `lm_eval` with the model `sqrtlm`: the harness does not look for models of other
packages. Without `--device` it requires a GPU. Programs that call `lm_eval.simple_evaluate` with
`model="sqrtlm"` call `register` first.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import lm

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
MAX_TOKENS = 256  # of a task that has none of them, as for other models of the harness


class HarnessModel:
    """The methods of `lm_eval.api.model.LM`, whose class `register` adds.

    Args:
        run: folder of the run.
        open_vocabulary: whether unknown words are spelled, as for `lm.load`; pieces that do not
            spell every word, and runs without a speller, require False.
        device, threads: as for `lm.load`.
        batch_size, max_batch_size: not used.
    """

    def __init__(
        self,
        run: str,
        *,
        open_vocabulary: bool = True,
        device: str = "auto",
        threads: int | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
    ) -> None:
        super().__init__()
        self.model = lm.load(run, device=device, threads=threads, open_vocabulary=open_vocabulary)

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is greedy."""
        scores = self.model.continuation_log_prob([request.args for request in requests])
        return [(score.log_prob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Log-probability of each text, without an `<eos>` after its last line."""
        scores = self.model.continuation_log_prob([("", *request.args) for request in requests])
        return [score.log_prob for score in scores]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continuation of each context up to one of the strings `until`, greedy by default."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, given: dict[str, Any]) -> str:
        options = dict(given)
        until, lengths = options.pop("until", None) or [], [options.pop(n, None) for n in LENGTHS]
        num_tokens = next((each for each in lengths if each is not None), MAX_TOKENS)
        if not num_tokens:
            return ""
        stop = [each for each in ([until] if isinstance(until, str) else until) if each]
        if not options.pop("do_sample", False):
            options = {"temperature": 0}
        return self.model.generate(context, num_tokens=num_tokens, stop=stop, **options)[0]


@cache
def register() -> Any:
    """Make `sqrtlm` known to the harness; returns its class."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    return register_model("sqrtlm")(type("SqrtLM", (HarnessModel, LM), {}))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()
