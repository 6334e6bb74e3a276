"""The learning curves of a run as a picture."""

from pathlib import Path

from lm.training.metrics import read_metrics


def draw_curves(folder: Path, title: str) -> None:
    """Draw `curves.png` from `metrics.csv`: training and validation perplexity over tokens."""
    from matplotlib.figure import Figure  # takes a second

    lines = read_metrics(folder / "metrics.csv")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [line.tokens for line in lines]
    axes.plot(tokens, [line.train_perplexity for line in lines], label="training", linewidth=1)
    validated = {line.tokens: line.valid_perplexity for line in lines if line.valid_perplexity}
    if validated:
        best = f"validation, best {min(validated.values()):.1f}"
        axes.plot(list(validated), list(validated.values()), "o-", label=best)
    axes.set(xlabel="tokens trained on", ylabel="perplexity", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(folder / "curves.png", dpi=120)
