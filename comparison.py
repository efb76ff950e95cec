"""Pass@k, its intervals, and the tables and pictures that put policies side by side.

    Pass@k = 1 - C(n - c, k) / C(n, k)        n sampled trajectories of a task, c of them successful      paper A, B.2

is the probability that at least one of k trajectories, drawn without replacement from the n, succeeds. An average over
tasks is worth as much as its interval: tasks differ in difficulty far more than policies differ in skill, so differences
are *paired*. Both policies' results on the same task are resampled together, and with several runs the base models and
the trainings on them are resampled too.
"""

import csv
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t

from envs import UsageError
from plots import Cell, curve, heat, panels, save

# ---- the maths ----


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased Pass@k from n samples of which c succeeded (paper A, B.2). Exact integers until the last division.

    Raises UsageError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise UsageError(f"pass_at_k needs 0 <= c <= n, not c={c} successes of n={n} samples")
    if not 1 <= k <= n:
        raise UsageError(f"Pass@{k} needs at least {k} samples a task, there are {n}: sample more (--n), or lower --k")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_values(counts: np.ndarray, n: int, k: int) -> np.ndarray:
    """Success counts of n samples (any shape) -> Pass@k of each, the same shape."""
    table = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    return table[counts]


def interval(
    values: np.ndarray,
    sizes: np.ndarray | None = None,
    bases: list | None = None,
    within: tuple[float, float] = (-np.inf, np.inf),
    draws: int = 4000,
    seed: int = 0,
) -> Cell:
    """(mean, low, high): the mean of values [runs, tasks] and its bootstrap 95 % interval.

    What was drawn at random when the experiment was made is drawn again, with replacement: tasks, once for all runs of a
    draw (a task is as hard for each of them), base models, and for each drawn base the runs trained on it. `bases` names
    the base of each run; by default each run has its own. `sizes` [runs, tasks] says how many observations stand behind
    each value (steps in a task, say); the mean is then over observations, but still whole tasks are resampled, because
    observations of one task are alike. `within` are limits that the mean cannot pass, 0 and 100 for a percentage. For a
    paired comparison pass *differences* of two policies (`paired_interval`).

    With one base model its trainings are what differs, and take the place of bases: what is said then holds for that base.

    With few base models the plain bootstrap is too narrow: it resamples m of them as if there were no others, and the
    normal quantile behind its percentiles is not Student's. So with several bases the part of the variance that lies
    between them is corrected by m / (m - 1), and the percentiles are widened by the t quantile of the effective degrees of
    freedom (Satterthwaite, the rest taken as known). tests/test_evaluate.py holds it to its 95 %.
    """
    rng = np.random.default_rng(seed)
    sizes = np.ones(values.shape) if sizes is None else sizes
    totals = np.where(sizes > 0, values * sizes, 0.0)
    runs, tasks = values.shape
    of_base: dict = {}
    for run, base in enumerate(bases if bases is not None and len(set(bases)) > 1 else range(runs)):
        of_base.setdefault(base, []).append(run)
    # How often each task, and each run, is in a draw: counts of draws with replacement are multinomial.
    task_counts = rng.multinomial(tasks, [1 / tasks] * tasks, size=draws)  # [draws, tasks]
    base_counts = rng.multinomial(len(of_base), [1 / len(of_base)] * len(of_base), size=draws)
    run_counts = np.zeros((draws, runs))
    for column, own in enumerate(of_base.values()):
        run_counts[:, own] = rng.multinomial(base_counts[:, column] * len(own), [1 / len(own)] * len(own))
    drawn = np.einsum("dr,rt,dt->d", run_counts, totals, task_counts, optimize=True)
    weights = np.einsum("dr,rt,dt->d", run_counts, sizes, task_counts, optimize=True)
    mean, means = totals.sum() / sizes.sum(), drawn[weights > 0] / weights[weights > 0]
    low, high = np.percentile(means, [2.5, 97.5])
    widen, m = 1.0, len(of_base)
    seen = [own for own in of_base.values() if sizes[own].sum() > 0]
    between = np.var([totals[own].sum() / sizes[own].sum() for own in seen], ddof=1) / m if len(seen) > 1 else 0.0
    if between > 0 and means.var() > 0:
        rest = max(0.0, means.var() - between * (m - 1) / m)
        freedom = (m - 1) * ((between + rest) / between) ** 2
        widen = student_t.ppf(0.975, freedom) / 1.96 * np.sqrt((between + rest) / means.var())
    low, high = np.clip([mean - widen * (mean - low), mean + widen * (high - mean)], *within)
    return float(mean), float(low), float(high)


FEWEST_TASKS = 10  # below that the tasks that were drawn say too little about those that were not


def interval_of(values, run, task, bases: list, within: tuple[float, float] = (-np.inf, np.inf)) -> Cell:
    """`interval` of N observations, each with the index of its run and of its task. NaN for the ends when they come from
    fewer than FEWEST_TASKS tasks, for all three when there are none."""
    if not len(values):
        return float("nan"), float("nan"), float("nan")
    if len(set(task)) < FEWEST_TASKS:
        return float(np.mean(values)), float("nan"), float("nan")
    totals = np.zeros((len(bases), max(task) + 1))
    sizes = np.zeros_like(totals)
    np.add.at(totals, (run, task), values)
    np.add.at(sizes, (run, task), 1.0)
    return interval(totals / np.maximum(sizes, 1), sizes, bases, within)


def paired_interval(a: np.ndarray, b: np.ndarray, **options) -> Cell:
    """(mean, low, high) of a - b, for results [runs, tasks] or [tasks] of two policies on the same tasks (see
    `interval` for the options). Raises UsageError when their shapes differ: they cannot be paired then."""
    a, b = np.atleast_2d(np.asarray(a, dtype=float)), np.atleast_2d(np.asarray(b, dtype=float))
    if a.shape != b.shape or a.size == 0:
        raise UsageError(f"a paired comparison needs results on the same runs and tasks, not {a.shape} and {b.shape}")
    return interval(a - b, **options)


# ---- tables and pictures ----


Pairs = list[tuple[str, str]]  # (one, other): the difference one - other is worth a row


@dataclass
class Comparison:
    """Results of several policies on the same tasks: `counts[label]` is [runs, tasks, budgets] of successes out of
    `samples[budget]`; `bases` names the base model of each run. Budgets ascend; `bound` is empty where it is unknown."""

    counts: dict[str, np.ndarray]
    samples: list[int]
    percents: tuple[int, ...]
    budgets: list[int]
    bound: list[float]
    bases: list
    k: int = 8

    def values(self, label: str, k: int, budget: int) -> np.ndarray:
        """Pass@k [runs, tasks] of a policy at a budget (its index), in percent."""
        return 100 * pass_values(self.counts[label][:, :, budget], self.samples[budget], k)

    def cell(self, label: str, k: int, budget: int, other: str | None = None) -> Cell:
        """(mean, low, high) of a policy's Pass@k, or of its paired difference to another's."""
        mine = self.values(label, k, budget)
        if other is not None:
            return paired_interval(mine, self.values(other, k, budget), bases=self.bases)
        return interval(mine, bases=self.bases, within=(0, 100))

    def ks(self, samples: int) -> list[int]:
        """1, 2, 4 .. up to the number of samples, and that number itself."""
        return sorted({2**i for i in range(samples.bit_length())} | {samples})

    def rows(
        self, k: int, pairs: Pairs, average: Pairs = (), columns: list[int] | None = None
    ) -> dict[str, list[Cell]]:
        """{row label: one cell per budget, or per index in `columns`}: the policies, then paired differences, then the
        average of some."""
        columns = range(len(self.budgets)) if columns is None else columns
        rows = {label: [self.cell(label, k, b) for b in columns] for label in self.counts}
        rows |= {f"{one} - {other}": [self.cell(one, k, b, other) for b in columns] for one, other in pairs}
        if len(average) > 1:
            gains = [
                np.mean([self.values(one, k, b) - self.values(other, k, b) for one, other in average], axis=0)
                for b in columns
            ]
            rows["average gain of BudgetMix"] = [interval(gain, bases=self.bases) for gain in gains]
        return rows

    def table(self, pairs: Pairs, average: Pairs = ()) -> str:
        """Markdown: for each k a table of the policies, as in the paper's Table 1 with the best of a column bold and the
        second best underlined, and one of the paired differences; all with 95 % intervals."""
        header = [f"T={b} ({p}%)" for b, p in zip(self.budgets, self.percents, strict=True)]
        lines = []
        for k in dict.fromkeys((1, self.k)):  # 1 is what a user gets, the other what the paper reports
            rows = self.rows(k, pairs, average)
            ranks = [sorted({round(rows[label][b][0], 1) for label in self.counts})[::-1] for b in range(len(header))]
            policies = {
                label: [
                    f"{_marked(mean, rank)} [{low:.1f}, {high:.1f}]"
                    for (mean, low, high), rank in zip(rows[label], ranks, strict=True)
                ]
                for label in self.counts
            }
            if self.bound:
                policies["structural bound"] = [f"{100 * b:.1f}" for b in self.bound]
            lines += markdown(f"Pass@{k}, %", header, policies)
            differences = {label: list(map(signed, row)) for label, row in rows.items() if label not in self.counts}
            if differences:
                lines += markdown(f"Pass@{k}, difference in points", header, differences)
        return "\n".join([*lines, self.caption()])

    def curve_table(self, pairs: Pairs) -> str:
        """Markdown: Pass@K at the largest budget, K = 1, 2, 4 .. n: the policies, and the paired differences."""
        ks = self.ks(self.samples[-1])
        header = [f"K={k}" for k in ks]
        plain = {label: [f"{self.values(label, k, -1).mean():.1f}" for k in ks] for label in self.counts}
        lines = markdown(f"Pass@K at T={self.budgets[-1]}, %", header, plain)
        if pairs:
            rows = {f"{a} - {b}": [signed(self.cell(a, k, -1, b)) for k in ks] for a, b in pairs}
            lines += markdown("difference in points", header, rows)
        return "\n".join(lines)

    def size(self) -> str:
        """What stands behind the numbers, for captions."""
        runs, tasks, _ = next(iter(self.counts.values())).shape
        played = " to ".join(map(str, sorted(set(self.samples))))
        distinct = len(set(self.bases))
        shared = f" on {distinct} base model{'s' * (distinct > 1)}" * (distinct < runs)
        return f"{tasks} tasks, {played} trajectories per task and budget, {runs} seed{'s' * (runs > 1)}{shared}"

    def caption(self) -> str:
        over = "tasks, base models and trainings" if len(self.bases) > 1 else "tasks"
        return (
            f"{self.size()}; temperature 0.6, top-p 0.9. Brackets: bootstrap 95 % intervals over "
            f"{over}, paired for differences (▲ ▼: zero is outside). Bold: best, underlined: second."
        )

    def write_csv(self, path: Path, pairs: Pairs, average: Pairs = ()) -> None:
        """The whole surface, for a spreadsheet or another program: one line per K, row and budget with as many samples."""
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["metric", "row", "budget", "percent_of_t_max", "mean", "low", "high"])
            for k in sorted({*self.ks(min(self.samples)), *self.ks(max(self.samples)), self.k}):
                columns = [b for b, n in enumerate(self.samples) if n >= k]
                for label, cells in self.rows(k, pairs, average, columns).items():
                    for b, cell in zip(columns, cells, strict=True):
                        place = [self.budgets[b], self.percents[b]]
                        out.writerow([f"pass@{k}", label, *place, *(f"{x:.3f}" for x in cell)])

    def plot(self, path: Path, groups: list[list[str]]) -> None:
        """Pass@T: a row of panels for each list of labels, a column for Pass@1 and one for Pass@k."""
        ks = list(dict.fromkeys((1, self.k)))
        figure, axes = panels(len(groups), len(ks), height=2.7, sharex=True, sharey=True)
        for labels, row in zip(groups, axes, strict=True):
            for axis, k in zip(row, ks, strict=True):
                self._draw_bound(axis, self.budgets, self.bound)
                for style, label in enumerate(labels):
                    cells = [self.cell(label, k, b) for b in range(len(self.budgets))]
                    curve(axis, self.budgets, cells, style, label)
                axis.set(xticks=sorted(set(self.budgets)), ylim=(0, 102))
            row[0].set_ylabel("tasks solved, %")
            row[-1].legend(loc="lower right")
        for axis, k in zip(axes[0], ks, strict=True):
            axis.set_title(f"Pass@{k}")
        for axis in axes[-1]:
            axis.set_xlabel("turn budget T")
        save(figure, path, self.size())

    def plot_breadth(self, path: Path) -> None:
        """Pass@K at the largest budget (paper A, Figure 2)."""
        ks = self.ks(self.samples[-1])
        figure, ((axis,),) = panels(width=5.6, height=3.2)
        self._draw_bound(axis, ks, self.bound[-1:] * len(ks))
        for style, label in enumerate(self.counts):
            curve(axis, ks, [self.cell(label, k, -1) for k in ks], style, label)
        axis.set_xscale("log", base=2)
        axis.set(xticks=ks, xticklabels=ks, xlabel="attempts K", ylabel="tasks solved by one of K, %", ylim=(None, 102))
        axis.set_title(f"Pass@K at T = {self.budgets[-1]}")
        axis.legend(loc="lower right")
        save(figure, path, self.size())

    @staticmethod
    def _draw_bound(axis, x: list[int], bound: list[float]) -> None:
        if bound:
            axis.plot(x, [100 * b for b in bound], color="#BBBBBB", lw=3, label="structural bound", zorder=1)

    def plot_surface(self, path: Path, pairs: Pairs) -> None:
        """Pass@(K,T): a heat map for each policy and, below, for each difference."""
        ks = self.ks(min(self.samples))
        surface = {
            label: np.array([[self.values(label, k, b).mean() for b in range(len(self.budgets))] for k in ks])
            for label in self.counts
        }
        pictures = [(label, values, False) for label, values in surface.items()]
        pictures += [(f"{a} - {b}", surface[a] - surface[b], True) for a, b in pairs]
        columns = min(3, max(len(surface), len(pairs)))
        # Differences begin a row of their own.
        first = -(-len(surface) // columns) * columns
        places = [*range(len(surface)), *range(first, first + len(pairs))]
        rows = -(-(places[-1] + 1) // columns)
        figure, axes = panels(rows, columns, width=max(2.6, 0.7 * len(self.budgets)), height=2.6)
        for axis in axes.flat:
            axis.set_visible(False)
        for place, (title, values, difference) in zip(places, pictures, strict=True):
            axis = axes.flat[place]
            axis.set_visible(True)
            heat(axis, values, [str(k) for k in ks], [str(b) for b in self.budgets], difference)
            unit = "points" if difference else "%"
            axis.set_title(title.replace(" - ", "\n- ") + f", {unit}", fontsize=9)
            axis.set(xlabel="turn budget T", ylabel="attempts K")
        save(figure, path, self.size())


def markdown(title: str, header: list[str], rows: dict[str, list[str]]) -> list[str]:
    """The lines of a Markdown table, and an empty one after it."""
    lines = [f"| {title} | " + " | ".join(header) + " |", "|---|" + "---|" * len(header)]
    return [*lines, *(f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows.items()), ""]


def signed(cell: Cell) -> str:
    """A difference with its interval, marked when zero is outside."""
    mean, low, high = cell
    if np.isnan(low):
        return "none" if np.isnan(mean) else f"{mean:+.1f} (too few tasks for an interval)"
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" + " ▲" * (low > 0) + " ▼" * (high < 0)


def fine(cell: Cell, sign: str = "+") -> str:
    """A small number with its interval."""
    mean, low, high = cell
    if np.isnan(low):
        return "none" if np.isnan(mean) else f"{mean:{sign}.3f} (too few tasks for an interval)"
    return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _marked(mean: float, rank: list[float]) -> str:
    """A mean, in bold if it is the best of its column and underlined if second; rank: the column's means, best first."""
    shown = f"{mean:.1f}"
    if len(rank) < 2 or round(mean, 1) not in rank[:2]:
        return shown
    return f"**{shown}**" if round(mean, 1) == rank[0] else f"<u>{shown}</u>"
