"""What a GPU must reach, written before it was measured, and whether rows show it."""

from typing import Any

Row = dict[str, Any]
FLOORS = {33_278: 3.5, 267_735: 2.0, 800_000: 1.5, 10_000_000: 1.5}
"""Vocabularies, and how many times the lower bound forward and backward take at most."""
OURS = "graph/triton"
BATCH = {"batch_size": 20, "seq_len": 35}
ROW_WISE = {"method": "layer", "dtype": "bf16", "outcome": "done"}


def acceptance(rows: dict[str, list[Row]]) -> list[str]:
    """A line for each requirement, which begins with met, missed or not measured.

    Args:
        rows: those of each log.
    """

    def find(log: str, field: str, **where: Any) -> float | None:
        """A field of the last row that has it."""
        found = [row[field] for row in rows[log] if where.items() <= row.items() and row.get(field)]
        return found[-1] if found else None

    def layer(field: str, size: int, label: str = OURS) -> float | None:
        return find("layer", field, vocab_size=size, label=label)

    def tokens(tree: str) -> float | None:
        return find("training", "tokens_per_second_median", tree=tree, **BATCH)

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    claims: list[tuple[str, float | None, str, float, str]] = []
    for size, most in FLOORS.items():
        claim = f"forward + backward at {size:,} words, captured"
        claims.append((claim, layer("ratio_to_floor", size), "≤", most, " × floor"))
    cce, ours = (layer("seconds_median", 800_000, label) for label in ("cce", OURS))
    classes, full = tokens("two_level"), tokens("torch")
    step = find("scale", "graph_seconds", vocab_size=10_000_000, **ROW_WISE)
    largest = find("scale", "seconds", vocab_size=100_000_000, **ROW_WISE)
    claims += [
        ("cut-cross-entropy at 800,000 words", ratio(cce, ours), "≥", 20, " × ours"),
        ("training with classes, 20 × 35", classes, "≥", 600_000, " tokens/s"),
        ("training with classes", ratio(classes, full), "≥", 1, " × torch's full"),
        ("a row-wise step at 10,000,000 × 300, captured", ratio(step, 1e-3), "≤", 11, " ms"),
        ("a row-wise step at 100,000,000 × 300", largest, "≤", 60, " s"),
    ]
    return [_line(*claim) for claim in claims]


def _line(claim: str, found: float | None, sign: str, limit: float, unit: str) -> str:
    claim = f"{claim} {sign} {limit:,}{unit}"
    if found is None:
        return f"not measured: {claim}"
    is_met = found <= limit if sign == "≤" else found >= limit
    return f"{'met' if is_met else 'missed'}: {claim}: {found:,.2f}{unit}"
