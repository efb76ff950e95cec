"""Every picture of this project in one style: readable at the size of a README, and by colour-blind readers.

Colours are Okabe and Ito's; models are told apart by marker and line as well. A curve is always drawn with the band of
its 95 % interval. Differences have a diverging map (orange: worse, purple: better) that is white at zero.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files, not windows: the same on a server without a screen
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams.update({
    "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "font.size": 10, "axes.titlesize": 11, "legend.fontsize": 8, "savefig.dpi": 150, "figure.dpi": 150,
})  # fmt: skip

# The first is the base's wherever there is one: grey and dotted, what the others are seen against.
STYLES = [("#555555", "o", ":"), ("#D55E00", "s", "--"), ("#0072B2", "^", "-"), ("#009E73", "D", "-."),
          ("#CC79A7", "v", "--"), ("#E69F00", "P", "-"), ("#56B4E9", "X", "-."), ("#000000", "*", ":")]  # fmt: skip
Cell = tuple[float, float, float]  # mean, low, high


def panels(rows: int = 1, columns: int = 1, width: float = 4.6, height: float = 2.9, **shared: Any):
    """(figure, axes [rows, columns]) in the project's style; width and height are those of one panel, in inches."""
    size = (width * columns, 0.3 + height * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)


def curve(axis, x: Sequence[float], cells: Sequence[Cell], style: int, label: str) -> None:
    """Means joined by a line, within the band of their intervals."""
    if not cells:
        return
    color, marker, line = next(islice(cycle(STYLES), style, None))
    mean, low, high = zip(*cells, strict=True)
    axis.plot(x, mean, color=color, marker=marker, ms=4, ls=line, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.13, lw=0)


def heat(axis, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], difference: bool = False) -> None:
    """A table of percentages [rows, columns] as a heat map with its numbers written in, first row at the bottom."""
    limit = max(1.0, float(np.abs(values).max()))
    look = (
        {"cmap": "PuOr", "vmin": -limit, "vmax": limit} if difference else {"cmap": "cividis", "vmin": 0, "vmax": 100}
    )
    axis.imshow(values, aspect="auto", origin="lower", **look)
    axis.set(xticks=range(len(columns)), xticklabels=columns, yticks=range(len(rows)), yticklabels=rows)
    axis.grid(False)
    for (r, c), value in np.ndenumerate(values):
        dark = abs(value) > 0.6 * limit if difference else value < 55
        text = f"{value:+.1f}" if difference else f"{value:.0f}"
        axis.text(c, r, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def save(figure, path: Path, note: str = "") -> None:
    """Write the picture, with a line below it that says what stands behind the numbers."""
    if note:
        figure.supxlabel(note, fontsize=8, color="#555555", wrap=True)
    figure.savefig(path)
    plt.close(figure)
