"""Pass@T: how good is a policy at every turn budget? Fresh rollouts per budget, unbiased Pass@k, paired intervals.

    Pass@k = 1 - C(n - c, k) / C(n, k)        n sampled trajectories of a task, c of them successful      paper A, B.2

is the probability that at least one of k trajectories, drawn without replacement from the n, succeeds. Pass@T is Pass@k
at a fixed k as the budget of turns T changes (B.3). Three things make the numbers comparable:

- *Fresh rollouts for each T.* The budget stands in the prompt, so cutting a long trajectory short is not the same as
  playing it with fewer turns: the agent might have hurried.
- *Everything is equal but the weights*: the same test maps, prompts, budgets, number of samples, temperature 0.6, top-p
  0.9 (B.1).
- *Paired intervals.* Maps differ in difficulty far more than policies differ in skill. The interval of a difference
  resamples maps, and takes both policies' results on the same map together (and, with several seeds, resamples the
  seeds too).

The grey line is the structural bound (B.3): the share of maps whose shortest path fits into T. No policy can be above
it.
"""

import csv
import hashlib
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import Annotated, Literal

import matplotlib.pyplot as plt
import numpy as np
import tyro
from tqdm import tqdm

from envs import UsageError
from rollout import HFEngine, Sampling, load_model, play, run_cli
from runs import make_folder, read_config, read_json, write_json
from warmstart import ModelArgs

PERCENTS = (25, 50, 75, 100)  # paper A, 5.3
EVAL_SAMPLING = {"temperature": 0.6, "top_p": 0.9}  # paper A, B.1
TEST_SEED = 0  # everyone is measured on the same maps, whatever seed they were trained with


# ---- the maths ----


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased Pass@k from n samples of which c succeeded (paper A, B.2). Exact integers until the last division.

    Raises UsageError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise UsageError(f"pass_at_k needs 0 <= c <= n, not c={c} successes of n={n} samples")
    if not 1 <= k <= n:
        raise UsageError(f"Pass@{k} needs at least {k} samples a task, there are {n}: sample more (--n), or lower k")
    return 1.0 - comb(n - c, k) / comb(n, k)


def budgets_of(t_max: int, percents: tuple[int, ...] = PERCENTS) -> list[int]:
    """The budgets at p percent of T_max, rounded up in integers: 70 gives 18, 35, 53, 70."""
    return [-(-p * t_max // 100) for p in percents]


def interval(values: np.ndarray, draws: int = 4000, seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high): the mean of values [seeds, tasks] and its bootstrap 95 % interval.

    Tasks are resampled once for all seeds of a draw (a map is as hard for each of them), and seeds too where there are
    several. For a paired comparison pass the *differences* of two policies on the same seeds and tasks.
    """
    rng = np.random.default_rng(seed)
    seeds, tasks = values.shape
    which_seeds = rng.integers(seeds, size=(draws, seeds, 1))
    which_tasks = rng.integers(tasks, size=(draws, 1, tasks))
    means = values[which_seeds, which_tasks].mean(axis=(1, 2))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def pass_values(counts: np.ndarray, n: int, k: int) -> np.ndarray:
    """Success counts of n samples (any shape) -> Pass@k of each, the same shape."""
    table = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    return table[counts]


# ---- rollouts ----


@dataclass
class Settings(ModelArgs):
    """What is measured, the same for every policy of a comparison."""

    eval_tasks: int = 100
    """Maps that each policy plays."""
    n: int = 16
    """Trajectories per map and budget; with fewer than 8 there is no Pass@8."""
    percents: tuple[int, ...] = PERCENTS
    """Budgets, in percent of T_max."""
    split: Literal["test", "val"] = "test"
    """test for reporting, val for choosing settings."""


def check(settings: Settings) -> None:
    """Refuse settings that measure nothing, before anything is trained or written. Raises UsageError."""
    settings.check()
    if settings.n < 1 or settings.eval_tasks < 1:
        raise UsageError("an evaluation needs at least one task and one sample a task (--eval-tasks, --n)")
    if not settings.percents or not all(1 <= p <= 100 for p in settings.percents):
        raise UsageError(f"percents must lie between 1 and 100, not {settings.percents}")
    if len(set(settings.percents)) < len(settings.percents):
        raise UsageError(f"percents must be different, not {settings.percents}")
    settings.new_env().tasks(settings.split, settings.eval_tasks, TEST_SEED)  # are there as many?


@dataclass
class Policy:
    """A base model, or with `run` the adapter that was trained on it. `stem` is where its measurement is kept."""

    label: str
    base: str | Path
    stem: Path
    run: Path | None = None


def measure(policy: Policy, settings: Settings) -> np.ndarray:
    """Successes [tasks, budgets] out of n. What was measured before under the same recipe is read and not sampled again."""
    # The weights themselves, not a step number: a log can be ahead of the adapter that was saved.
    weights = policy.run / "adapter" / "adapter_model.safetensors" if policy.run else None
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights else "base"
    recipe = {"base": str(policy.base), "adapter": digest, "sampling": EVAL_SAMPLING}
    recipe |= {f: getattr(settings, f) for f in ("env", "history", "max_tokens", "eval_tasks", "n", "split")}
    recipe |= {f: list(getattr(settings, f)) for f in ("env_args", "percents")}
    stored = policy.stem / f"eval-{settings.split}.json"
    if stored.exists():
        found = read_json(stored)
        if found["recipe"] == recipe:
            return np.array(found["counts"])

    env = settings.new_env()
    tasks = env.tasks(settings.split, settings.eval_tasks, TEST_SEED)
    budgets = budgets_of(env.max_turns, settings.percents)
    engine = HFEngine(*load_model(policy.base), settings.sample_batch)
    if policy.run:
        engine.load_adapter(policy.run / "adapter")
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=settings.max_tokens)
    counts, turns = np.zeros((len(tasks), len(budgets)), dtype=int), []
    for column, budget in enumerate(tqdm(budgets, desc=f"evaluating {policy.label}", unit="budget")):
        games = [(task, i * 10_007 + j, budget) for i, task in enumerate(tasks) for j in range(settings.n)]
        played = play(engine, settings.new_env, games, sampling, seed=TEST_SEED + budget, history=settings.history)
        if all(t.stop == "context" and not t.turns for t in played):
            raise UsageError(
                f"no prompt fits into the context of {engine.context} tokens: lower --max-tokens or --history"
            )
        counts[:, column] = np.array([t.success for t in played]).reshape(len(tasks), -1).sum(axis=1)
        turns.append(sum(len(t.turns) for t in played) / len(played))
    make_folder(policy.stem)
    write_json(stored, {"recipe": recipe, "budgets": budgets, "mean_turns": turns, "counts": counts.tolist()})
    return counts


def structural_bound(settings: Settings) -> list[float]:
    """Share of the tasks that can succeed at all within each budget (paper A, B.3)."""
    env = settings.new_env()
    needed = [env.min_turns(task) or 1 for task in env.tasks(settings.split, settings.eval_tasks, TEST_SEED)]
    return [sum(m <= b for m in needed) / len(needed) for b in budgets_of(env.max_turns, settings.percents)]


# ---- table and picture ----


Pairs = list[tuple[str, str]]  # (one, other): the difference one - other is worth a row


@dataclass
class Comparison:
    """Results of several policies on the same tasks: `counts[label]` is [seeds, tasks, budgets] of successes out of n."""

    counts: dict[str, np.ndarray]
    n: int
    percents: tuple[int, ...]
    budgets: list[int]
    bound: list[float]

    def ks(self) -> list[int]:
        return [k for k in (1, 8) if k <= self.n]  # the paper's main k is 8; 1 is what a user gets

    def rows(self, k: int, pairs: Pairs, average: Pairs = ()) -> dict[str, list[tuple[float, float, float]]]:
        """{row label: (mean, low, high) per budget}, in percent: policies, then paired differences, then their average."""
        values = {label: 100 * pass_values(counts, self.n, k) for label, counts in self.counts.items()}
        rows = dict(values)
        rows |= {f"{one} - {other}": values[one] - values[other] for one, other in pairs}
        if len(average) > 1:
            rows["average gain of BudgetMix"] = np.mean([values[one] - values[other] for one, other in average], axis=0)
        return {label: [interval(v[:, :, b]) for b in range(len(self.budgets))] for label, v in rows.items()}

    def table(self, pairs: Pairs, average: Pairs = ()) -> str:
        """Markdown: for each k a table of the policies, as in the paper's Table 1 with the best of a column bold and the
        second best underlined, and one of the paired differences; all with 95 % intervals."""
        seeds, tasks, _ = next(iter(self.counts.values())).shape
        header = [f"T={b} ({p}%)" for b, p in zip(self.budgets, self.percents, strict=True)]
        lines = []

        def add(title: str, rows: dict[str, list[str]]) -> None:
            lines.extend([f"| {title} | " + " | ".join(header) + " |", "|---|" + "---|" * len(header)])
            lines.extend(f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows.items())
            lines.append("")

        for k in self.ks():
            rows = self.rows(k, pairs, average)
            ranks = [sorted({round(rows[label][b][0], 1) for label in self.counts})[::-1] for b in range(len(header))]
            policies = {
                label: [
                    f"{_marked(mean, rank)} [{low:.1f}, {high:.1f}]"
                    for (mean, low, high), rank in zip(rows[label], ranks, strict=True)
                ]
                for label in self.counts
            }
            add(f"Pass@{k}, %", policies | {"structural bound": [f"{100 * b:.1f}" for b in self.bound]})
            differences = {
                label: [
                    f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" + " ▲" * (low > 0) + " ▼" * (high < 0)
                    for mean, low, high in cells
                ]
                for label, cells in rows.items()
                if label not in self.counts
            }
            if differences:
                add(f"Pass@{k}, difference in points", differences)
        over = "maps and seeds" if seeds > 1 else "maps"
        lines.append(
            f"{tasks} maps, {self.n} trajectories per map and budget, {seeds} seed{'s' if seeds > 1 else ''}; "
            f"temperature 0.6, top-p 0.9. Brackets: bootstrap 95 % intervals over {over}, paired for differences "
            "(▲ ▼: zero is outside). Bold: best, underlined: second."
        )
        return "\n".join(lines)

    def write_csv(self, path: Path, pairs: Pairs, average: Pairs = ()) -> None:
        """The same numbers for a spreadsheet or another program: one line per metric, row and budget."""
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["metric", "row", "budget", "percent_of_t_max", "mean", "low", "high"])
            for k in self.ks():
                for label, cells in self.rows(k, pairs, average).items():
                    for budget, percent, cell in zip(self.budgets, self.percents, cells, strict=True):
                        out.writerow([f"pass@{k}", label, budget, percent, *(f"{x:.3f}" for x in cell)])

    def plot(self, path: Path, panels: list[list[str]]) -> None:
        """Pass@k against the budget: a row of panels for each list of labels, a column for each k; bands are intervals."""
        ks = self.ks()
        size = (4.6 * len(ks), 0.6 + 2.7 * len(panels))
        figure, axes = plt.subplots(len(panels), len(ks), figsize=size, sharex=True, sharey=True, squeeze=False)
        # Okabe and Ito's colours, told apart by marker and line as well.
        styles = [("#555555", "o", ":"), ("#D55E00", "s", "--"), ("#0072B2", "^", "-"), ("#009E73", "D", "-."),
                  ("#CC79A7", "v", "--"), ("#E69F00", "P", "-")]  # fmt: skip
        values = {k: self.rows(k, []) for k in ks}
        for labels, row in zip(panels, axes, strict=True):
            for axis, k in zip(row, ks, strict=True):
                bound = [100 * b for b in self.bound]
                axis.plot(self.budgets, bound, color="#BBBBBB", lw=3, label="structural bound", zorder=1)
                for label, (color, marker, line) in zip(labels, styles * 9, strict=False):
                    mean, low, high = zip(*values[k][label], strict=True)
                    axis.plot(self.budgets, mean, color=color, marker=marker, ls=line, label=label)
                    axis.fill_between(self.budgets, low, high, color=color, alpha=0.13, lw=0)
                axis.set(xticks=sorted(set(self.budgets)), ylim=(0, 102))
                axis.grid(alpha=0.3)
            row[0].set_ylabel("tasks solved, %")
            row[-1].legend(loc="lower right", fontsize=8)
        for axis, k in zip(axes[0], ks, strict=True):
            axis.set_title(f"Pass@{k}")
        for axis in axes[-1]:
            axis.set_xlabel("turn budget T")
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _marked(mean: float, rank: list[float]) -> str:
    """A mean, in bold if it is the best of its column and underlined if second; rank: the column's means, best first."""
    shown = f"{mean:.1f}"
    if len(rank) < 2 or round(mean, 1) not in rank[:2]:
        return shown
    return f"**{shown}**" if round(mean, 1) == rank[0] else f"<u>{shown}</u>"


def compare(groups: dict[str, list[Policy]], settings: Settings) -> Comparison:
    """Measure policies, given as {label: one Policy per seed}, on the same tasks and budgets."""
    check(settings)
    counts = {label: np.stack([measure(p, settings) for p in policies]) for label, policies in groups.items()}
    budgets = budgets_of(settings.new_env().max_turns, settings.percents)
    return Comparison(counts, settings.n, settings.percents, budgets, structural_bound(settings))


# ---- the command ----


@dataclass
class Args(Settings):
    """Measure the base model and trained runs at several budgets, and compare them."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ("base",)
    """"base" and run folders; the first is what the others are compared with."""


def main(args: Args) -> None:
    check(args)
    runs = [Path(m) for m in args.models if m != "base"]
    configs = [read_config(run) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        differ = [f for f in ("env_args", "history", "base") if config[f] != configs[0][f]]
        if config["env"] != args.env or differ:
            raise UsageError(f"{run} was trained with another {differ[0] if differ else 'env'}: compare like with like")
    if configs:  # runs bring their game with them
        given = {"env_args": list(args.env_args), "history": args.history}
        for name, value in given.items():
            if value and value != configs[0][name]:
                raise UsageError(f"--{name.replace('_', '-')} is the run's own, {configs[0][name]!r}: leave it out")
        same = {f: configs[0][f] for f in ("history", "max_tokens", "seed", "model")}
        args = replace(args, **same, env_args=tuple(configs[0]["env_args"]))
    base, out = configs[0]["base"] if configs else args.base(), args.out / "evaluation"
    groups = {
        m: [Policy(m, base, out / "base") if m == "base" else Policy(m, base, Path(m), Path(m))] for m in args.models
    }
    result = compare(groups, args)
    labels = list(groups)
    pairs = [(label, labels[0]) for label in labels[1:]] + [(labels[-1], label) for label in labels[1:-1]]
    table = result.table(pairs)
    make_folder(out)
    (out / "table.md").write_text(table + "\n")
    result.write_csv(out / "table.csv", pairs)
    result.plot(out / "pass_at_t.png", [labels])
    print(f"\n{table}\n\ntable.md, table.csv and pass_at_t.png lie in {out}/")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
