"""Bars of an experiment's figures beside the paper's, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.reproduce.experiments import Experiment
from loadtest.reproduce.runner import Outcome

MOST_PLOTS = 4
PLOTTED = ("req/s", "mean E2E s", "P95 TTFT s", "lost reuse %", "mean TTFT s")


def draw(experiment: Experiment, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Returns the files. Needs matplotlib (the extra `loadtest`): raises ImportError without."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [name for name in PLOTTED if name in experiment.columns][:MOST_PLOTS]
    labels = [run.label for run in experiment.runs]
    figure, axes = pyplot.subplots(
        1, len(columns), figsize=(4.2 * len(columns), 0.42 * len(labels) + 1.6), squeeze=False
    )
    for axis, column in zip(axes[0], columns, strict=True):
        places = range(len(labels))
        axis.barh([p - 0.2 for p in places], [o.mean[column] for o in outcomes], 0.4, label="simulated")
        paper = [run.paper.get(column, 0.0) for run in experiment.runs]
        if any(paper):
            axis.barh([p + 0.2 for p in places], paper, 0.4, label="paper", color="0.7")
        axis.set_yticks(list(places), labels if axis is axes[0][0] else [""] * len(labels), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(column, fontsize=9)
        axis.tick_params(axis="x", labelsize=8)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{experiment.source}: {experiment.title}", fontsize=9)
    figure.tight_layout()
    files = [folder / f"{experiment.name}.{kind}" for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
    return files
