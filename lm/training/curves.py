"""The learning curves of a run as a picture."""

from pathlib import Path

from lm.training.metrics import read_metrics


def draw_curves(folder: Path, title: str) -> Path:
    """Draw `curves.png` from `metrics.csv`: training and validation perplexity over tokens.

    Args:
        folder: folder of the run, with both files.
        title: title of the picture.

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure  # takes a second

    lines = read_metrics(folder / "metrics.csv")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [line.tokens for line in lines],
        [line.train_perplexity for line in lines],
        label="training",
        linewidth=1,
    )
    validated = [
        (line.tokens, line.valid_perplexity) for line in lines if line.valid_perplexity is not None
    ]
    if validated:
        tokens, perplexities = zip(*validated, strict=True)
        axes.plot(tokens, perplexities, "o-", label=f"validation, best {min(perplexities):.1f}")
    axes.set(xlabel="tokens trained on", ylabel="perplexity", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    return path
