"""Pass@(K,T): what can a policy do with K attempts of T turns each? Stored samples, an unbiased estimator, paired intervals.

    Pass@k = 1 - C(n - c, k) / C(n, k)        n sampled trajectories of a task, c of them successful      paper A, B.2

is the probability that at least one of k trajectories, drawn without replacement from the n, succeeds: breadth. The
budget of turns T is depth. Pass@K is the curve over K at the full budget, Pass@T the curve over T at one K (B.3),
Pass@(K,T) the whole surface (2.2). Four things make the numbers comparable:

- *Fresh rollouts for each T.* The budget stands in the prompt, so cutting a long trajectory short is not the same as
  playing it with fewer turns: the agent might have hurried.
- *Everything is equal but the weights*: the same test maps, prompts, budgets, number of samples, temperature 0.6, top-p
  0.9 (B.1).
- *Sampled once.* Every trajectory's outcome is a line in `out`/samples/; all K come from the same n lines, asking for a
  larger n samples only what is missing, and a killed evaluation goes on where it was.
- *Paired intervals.* Maps differ in difficulty far more than policies differ in skill. The interval of a difference
  resamples maps, and takes both policies' results on the same map together (and, with several runs, resamples the base
  models and the trainings on them too).

The grey line is the structural bound (B.3): the share of maps whose shortest path fits into T. No policy can be above
it.

    python evaluate.py base runs/full runs/mix --env frozenlake
"""

import csv
import hashlib
import json
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from envs import UsageError
from plots import Cell, curve, heat, panels, save
from rollout import HFEngine, Sampling, load_model, play, run_cli
from runs import make_folder, read_config, replace_file, run_label
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
        raise UsageError(f"Pass@{k} needs at least {k} samples a task, there are {n}: sample more (--n), or lower --k")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_values(counts: np.ndarray, n: int, k: int) -> np.ndarray:
    """Success counts of n samples (any shape) -> Pass@k of each, the same shape."""
    table = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    return table[counts]


def budgets_of(t_max: int, percents: tuple[int, ...] = PERCENTS) -> list[int]:
    """The budgets at p percent of T_max, rounded up in integers: 70 gives 18, 35, 53, 70."""
    return [-(-p * t_max // 100) for p in percents]


def interval(
    values: np.ndarray, sizes: np.ndarray | None = None, bases: list | None = None, draws: int = 4000, seed: int = 0
) -> Cell:
    """(mean, low, high): the mean of values [runs, tasks] and its bootstrap 95 % interval.

    What was drawn at random when the experiment was made is drawn again, with replacement: tasks, once for all runs of a
    draw (a map is as hard for each of them), base models, and for each drawn base the runs trained on it. `bases` names
    the base of each run; by default each run has its own. `sizes` [runs, tasks] says how many observations stand behind
    each value (steps in a map, say); the mean is then over observations, but still whole tasks are resampled, because
    observations of one task are alike. For a paired comparison pass *differences* of two policies (`paired_interval`).

    A bootstrap cannot see more than it was given: with two to four base models that differ more than their maps do, its
    intervals are too narrow (they held the truth in 75 to 90 % of simulations, in 92 to 96 % otherwise).
    """
    rng = np.random.default_rng(seed)
    sizes = np.ones(values.shape) if sizes is None else sizes
    runs, tasks = values.shape
    of_base: dict = {}
    for run, base in enumerate(bases if bases is not None else range(runs)):
        of_base.setdefault(base, []).append(run)
    # How often each task, and each run, is in a draw: counts of draws with replacement are multinomial.
    task_counts = rng.multinomial(tasks, [1 / tasks] * tasks, size=draws)  # [draws, tasks]
    base_counts = rng.multinomial(len(of_base), [1 / len(of_base)] * len(of_base), size=draws)
    run_counts = np.zeros((draws, runs))
    for column, own in enumerate(of_base.values()):
        times = base_counts[:, column] * len(own)
        run_counts[:, own] = rng.multinomial(times, [1 / len(own)] * len(own)) / len(own)
    totals = np.einsum("dr,rt,dt->d", run_counts, np.where(sizes > 0, values * sizes, 0.0), task_counts, optimize=True)
    weights = np.einsum("dr,rt,dt->d", run_counts, sizes, task_counts, optimize=True)
    # A draw in which no observation fell (few tasks, some of them empty) says nothing.
    low, high = np.percentile(totals[weights > 0] / weights[weights > 0], [2.5, 97.5])
    return float((np.where(sizes > 0, values, 0.0) * sizes).sum() / sizes.sum()), float(low), float(high)


def interval_of(values, run, task, bases: list) -> Cell:
    """`interval` of N observations, each with the index of its run and of its task; without any, three NaN."""
    if not len(values):
        return float("nan"), float("nan"), float("nan")
    totals = np.zeros((len(bases), max(task) + 1))
    sizes = np.zeros_like(totals)
    np.add.at(totals, (run, task), values)
    np.add.at(sizes, (run, task), 1.0)
    return interval(totals / np.maximum(sizes, 1), sizes, bases)


def paired_interval(a: np.ndarray, b: np.ndarray, **options) -> Cell:
    """(mean, low, high) of a - b, for results [runs, tasks] or [tasks] of two policies on the same tasks (see
    `interval` for the options). Raises UsageError when their shapes differ: they cannot be paired then."""
    a, b = np.atleast_2d(np.asarray(a, dtype=float)), np.atleast_2d(np.asarray(b, dtype=float))
    if a.shape != b.shape or a.size == 0:
        raise UsageError(f"a paired comparison needs results on the same runs and tasks, not {a.shape} and {b.shape}")
    return interval(a - b, **options)


# ---- rollouts ----


@dataclass
class HeldOut(ModelArgs):
    """The tasks on which trained models are looked at."""

    eval_tasks: int = 100
    """Maps that each policy plays."""
    split: Literal["test", "val"] = "test"
    """test for reporting, val for choosing settings."""

    def check(self) -> None:
        super().check()
        if self.eval_tasks < 1:
            raise UsageError(f"eval_tasks must be at least 1, not {self.eval_tasks}")
        self.new_env().tasks(self.split, self.eval_tasks, TEST_SEED)  # are there as many?


@dataclass
class Settings(HeldOut):
    """What is measured, the same for every policy of a comparison."""

    n: int = 16
    """Trajectories per map at the full budget, of which Pass@K is computed for K up to n."""
    surface_n: int = 0
    """Trajectories per map at each smaller budget; 0: as many as at the full one."""
    k: int = 8
    """The K of Pass@T."""
    percents: tuple[int, ...] = PERCENTS
    """Budgets, in percent of T_max."""

    def check(self) -> None:
        super().check()
        if self.n < 1 or self.surface_n < 0:
            raise UsageError("an evaluation needs at least one sample a task (--n, --surface-n)")
        if self.k < 1:
            raise UsageError(f"k must be at least 1, not {self.k}")
        if not self.percents or not all(1 <= p <= 100 for p in self.percents):
            raise UsageError(f"percents must lie between 1 and 100, not {self.percents}")
        if len(set(self.percents)) < len(self.percents):
            raise UsageError(f"percents must be different, not {self.percents}")
        for n in self.samples():
            pass_at_k(n, 0, self.k)  # says what to do when there are fewer samples than k

    def budgets(self) -> list[int]:
        return budgets_of(self.new_env().max_turns, self.percents)

    def samples(self) -> list[int]:
        """How many trajectories per map are played at each budget."""
        t_max = self.new_env().max_turns
        return [self.n if budget == t_max else self.surface_n or self.n for budget in self.budgets()]


@dataclass(frozen=True)
class Policy:
    """A base model, or with `run` the adapter that was trained on it."""

    base: str | Path
    run: Path | None = None

    @property
    def name(self) -> str:
        """For file names and bars."""
        return (self.run or Path(str(self.base))).name

    def engine(self, settings: ModelArgs) -> HFEngine:
        engine = HFEngine(*load_model(self.base), settings.sample_batch)
        if self.run:
            engine.load_adapter(self.run / "adapter")
        return engine


def samples_file(policy: Policy, settings: Settings) -> Path:
    """Where the outcomes of a policy are kept. The name holds a hash of all that they depend on: what was measured under
    other conditions, or with weights that were trained further since, is another file."""
    # The weights themselves, not a step number: a log can be ahead of the adapter that was saved.
    weights = policy.run / "adapter" / "adapter_model.safetensors" if policy.run else None
    try:
        adapter = hashlib.sha256(weights.read_bytes()).hexdigest() if weights else None
    except OSError as error:
        raise UsageError(f"no usable adapter in {policy.run}: {error}") from None
    recipe = {"base": str(policy.base), "adapter": adapter, "sampling": EVAL_SAMPLING}
    recipe |= {f: getattr(settings, f) for f in ("env", "env_args", "history", "max_tokens", "split")}
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    return settings.out / "samples" / f"{policy.name}-{settings.split}-{digest}.jsonl"


def measure(policy: Policy, settings: Settings) -> np.ndarray:
    """Successes [tasks, budgets] among the first n trajectories of each task and budget (`Settings.samples`).

    What is stored is not sampled again. Games are played in batches of `sample_batch`, and a batch is stored as a whole
    or not at all: an evaluation that was killed and started again plays the very batches, with the very seeds, that an
    uninterrupted one would have played.
    """
    path, tasks = (
        samples_file(policy, settings),
        settings.new_env().tasks(settings.split, settings.eval_tasks, TEST_SEED),
    )
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    success: dict[tuple[int, str, int], bool] = {}
    for number, line in enumerate(lines, 1):
        try:
            game = json.loads(line)
            success[game["budget"], game["task"], game["sample"]] = bool(game["success"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path}, line {number}, is damaged: remove the file and run again") from None

    wanted = dict.fromkeys(
        (budget, task, sample)  # task by task: equal prompts meet in a batch, and each is computed once
        for budget, n in zip(settings.budgets(), settings.samples(), strict=True)
        for task in tasks
        for sample in range(n)
    )
    missing = [game for game in wanted if (game[0], game[1].id, game[2]) not in success]
    if missing:
        make_folder(path.parent)
        engine = policy.engine(settings)
        sampling = Sampling(**EVAL_SAMPLING, max_tokens=settings.max_tokens)
        batches = [missing[i : i + settings.sample_batch] for i in range(0, len(missing), settings.sample_batch)]
        with tqdm(
            desc=f"evaluating {policy.name}", total=len(wanted), initial=len(wanted) - len(missing), unit="game"
        ) as bar:
            for batch in batches:
                seed = Random(f"samples {batch[0][0]} {batch[0][1].id} {batch[0][2]}").randrange(2**31)
                games = [(t, Random(f"episode {t.id} {s}").randrange(2**31), b) for b, t, s in batch]
                played = play(engine, settings.new_env, games, sampling, seed, settings.history)
                if all(t.stop == "context" and not t.turns for t in played):
                    raise UsageError(
                        f"no prompt fits into the context of {engine.context} tokens: lower --max-tokens or --history"
                    )
                for (budget, task, sample), t in zip(batch, played, strict=True):
                    game = {"budget": budget, "task": task.id, "sample": sample, "success": t.success}
                    lines.append(json.dumps(game | {"turns": len(t.turns), "stop": t.stop}) + "\n")
                    success[budget, task.id, sample] = t.success
                replace_file(path, lambda part: part.write_text("".join(lines)))
                bar.update(len(batch))
    return np.array([
        [sum(success[budget, task.id, s] for s in range(n))
         for budget, n in zip(settings.budgets(), settings.samples(), strict=True)]
        for task in tasks
    ])  # fmt: skip


def structural_bound(settings: Settings) -> list[float]:
    """Share of the tasks that can succeed at all within each budget (paper A, B.3)."""
    env = settings.new_env()
    needed = [env.min_turns(task) or 1 for task in env.tasks(settings.split, settings.eval_tasks, TEST_SEED)]
    return [sum(m <= b for m in needed) / len(needed) for b in settings.budgets()]


# ---- tables and pictures ----


Pairs = list[tuple[str, str]]  # (one, other): the difference one - other is worth a row


@dataclass
class Comparison:
    """Results of several policies on the same tasks: `counts[label]` is [runs, tasks, budgets] of successes out of
    `samples[budget]`; `bases` names the base model of each run."""

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
        return interval(mine, bases=self.bases)

    def ks(self, samples: int) -> list[int]:
        """1, 2, 4 .. up to the number of samples, and that number itself."""
        return sorted({2**i for i in range(samples.bit_length())} | {samples})

    def rows(self, k: int, pairs: Pairs, average: Pairs = ()) -> dict[str, list[Cell]]:
        """{row label: one cell per budget}: the policies, then paired differences, then the average of some."""
        columns = range(len(self.budgets))
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
            policies["structural bound"] = [f"{100 * b:.1f}" for b in self.bound]
            lines += markdown(f"Pass@{k}, %", header, policies)
            differences = {label: list(map(signed, row)) for label, row in rows.items() if label not in self.counts}
            if differences:
                lines += markdown(f"Pass@{k}, difference in points", header, differences)
        return "\n".join([*lines, self.caption()])

    def curve_table(self, pairs: Pairs) -> str:
        """Markdown: Pass@K at the largest budget, K = 1, 2, 4 .. n: the policies, and the paired differences."""
        last = int(np.argmax(self.budgets))
        ks = self.ks(self.samples[last])
        header = [f"K={k}" for k in ks]
        plain = {label: [f"{self.cell(label, k, last)[0]:.1f}" for k in ks] for label in self.counts}
        lines = markdown(f"Pass@K at T={self.budgets[last]}, %", header, plain)
        if pairs:
            rows = {f"{a} - {b}": [signed(self.cell(a, k, last, b)) for k in ks] for a, b in pairs}
            lines += markdown("difference in points", header, rows)
        return "\n".join(lines)

    def caption(self) -> str:
        runs, tasks, _ = next(iter(self.counts.values())).shape
        played = sorted(set(self.samples))
        over = "maps, base models and trainings" if runs > 1 else "maps"
        return (
            f"{tasks} maps, {' to '.join(map(str, played))} trajectories per map and budget, "
            f"{runs} seed{'s' if runs > 1 else ''}; temperature 0.6, top-p 0.9. Brackets: bootstrap 95 % intervals over "
            f"{over}, paired for differences (▲ ▼: zero is outside). Bold: best, underlined: second."
        )

    def write_csv(self, path: Path, pairs: Pairs, average: Pairs = ()) -> None:
        """The whole surface, for a spreadsheet or another program: one line per K, row and budget."""
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["metric", "row", "budget", "percent_of_t_max", "mean", "low", "high"])
            for k in sorted({*self.ks(min(self.samples)), self.k}):
                for label, cells in self.rows(k, pairs, average).items():
                    for budget, percent, cell in zip(self.budgets, self.percents, cells, strict=True):
                        out.writerow([f"pass@{k}", label, budget, percent, *(f"{x:.3f}" for x in cell)])

    def plot(self, path: Path, groups: list[list[str]]) -> None:
        """Pass@T: a row of panels for each list of labels, a column for Pass@1 and one for Pass@k."""
        ks = list(dict.fromkeys((1, self.k)))
        figure, axes = panels(len(groups), len(ks), height=2.7, sharex=True, sharey=True)
        order = np.argsort(self.budgets)
        x = np.array(self.budgets)[order]
        for labels, row in zip(groups, axes, strict=True):
            for axis, k in zip(row, ks, strict=True):
                bound = 100 * np.array(self.bound)[order]
                axis.plot(x, bound, color="#BBBBBB", lw=3, label="structural bound", zorder=1)
                for style, label in enumerate(labels):
                    curve(axis, x, [self.cell(label, k, b) for b in order], style, label)
                axis.set(xticks=sorted(set(self.budgets)), ylim=(0, 102))
            row[0].set_ylabel("tasks solved, %")
            row[-1].legend(loc="lower right")
        for axis, k in zip(axes[0], ks, strict=True):
            axis.set_title(f"Pass@{k}")
        for axis in axes[-1]:
            axis.set_xlabel("turn budget T")
        save(figure, path)

    def plot_breadth(self, path: Path) -> None:
        """Pass@K at the largest budget (paper A, Figure 2)."""
        last = int(np.argmax(self.budgets))
        ks = self.ks(self.samples[last])
        figure, ((axis,),) = panels(width=5.2, height=3.2)
        axis.axhline(100 * self.bound[last], color="#BBBBBB", lw=3, label="structural bound", zorder=1)
        for style, label in enumerate(self.counts):
            curve(axis, ks, [self.cell(label, k, last) for k in ks], style, label)
        axis.set_xscale("log", base=2)
        axis.set(xticks=ks, xticklabels=ks, xlabel="attempts K", ylabel="tasks solved by one of K, %", ylim=(None, 102))
        axis.set_title(f"Pass@K at T = {self.budgets[last]} (n = {self.samples[last]})")
        axis.legend(loc="lower right")
        save(figure, path)

    def plot_surface(self, path: Path, pairs: Pairs) -> None:
        """Pass@(K,T): a heat map for each policy and, below, for each difference."""
        ks = self.ks(min(self.samples))
        surface = {
            label: np.array([[self.values(label, k, b).mean() for b in range(len(self.budgets))] for k in ks])
            for label in self.counts
        }
        columns = max(len(surface), len(pairs))
        figure, axes = panels(1 + bool(pairs), columns, width=max(2.6, 0.7 * len(self.budgets)), height=2.6)
        for axis in axes.flat:
            axis.set_visible(False)
        pictures = [(axes[0][i], label, values, False) for i, (label, values) in enumerate(surface.items())]
        pictures += [(axes[1][i], f"{a} - {b}", surface[a] - surface[b], True) for i, (a, b) in enumerate(pairs)]
        for axis, title, values, difference in pictures:
            axis.set_visible(True)
            heat(axis, values, [str(k) for k in ks], [str(b) for b in self.budgets], difference)
            unit = "points" if difference else "%"
            axis.set_title(title.replace(" - ", "\n- ") + f", {unit}", fontsize=9)
            axis.set(xlabel="turn budget T", ylabel="attempts K")
        save(figure, path)


def markdown(title: str, header: list[str], rows: dict[str, list[str]]) -> list[str]:
    """The lines of a Markdown table, and an empty one after it."""
    lines = [f"| {title} | " + " | ".join(header) + " |", "|---|" + "---|" * len(header)]
    return [*lines, *(f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows.items()), ""]


def signed(cell: Cell) -> str:
    """A difference with its interval, marked when zero is outside."""
    mean, low, high = cell
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" + " ▲" * (low > 0) + " ▼" * (high < 0)


def fine(cell: Cell, sign: str = "+") -> str:
    """A small number with its interval."""
    mean, low, high = cell
    return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _marked(mean: float, rank: list[float]) -> str:
    """A mean, in bold if it is the best of its column and underlined if second; rank: the column's means, best first."""
    shown = f"{mean:.1f}"
    if len(rank) < 2 or round(mean, 1) not in rank[:2]:
        return shown
    return f"**{shown}**" if round(mean, 1) == rank[0] else f"<u>{shown}</u>"


Groups = dict[str, list[Policy]]  # label -> one policy per run; the same bases in the same order for every label


def compare(groups: Groups, settings: Settings) -> Comparison:
    """Measure policies on the same tasks and budgets."""
    settings.check()
    counts = {label: np.stack([measure(p, settings) for p in policies]) for label, policies in groups.items()}
    bases = [str(policy.base) for policy in next(iter(groups.values()))]
    bound = structural_bound(settings)
    return Comparison(counts, settings.samples(), settings.percents, settings.budgets(), bound, bases, settings.k)


# ---- the command ----


def read_models(models: tuple[str, ...], args: HeldOut) -> tuple[Groups, HeldOut]:
    """ "base" and run folders -> policies by label, and the arguments with the game that the runs were trained on.

    Runs that differ in their seed and base alone are repetitions of one experiment and come under one label, the way
    they were trained ("GRPO + BudgetMix"); when two experiments would have the same label, it is the folder's name.
    Raises UsageError for runs that cannot be compared: other games, or arms with other seeds.
    """
    paths = [Path(model) for model in models if model != "base"]
    if len(set(models)) < len(models):
        raise UsageError(f"a model is named twice: {' '.join(models)}")
    configs = [read_config(path) for path in paths]
    for path, config in zip(paths, configs, strict=True):
        differ = [f for f in ("env_args", "history", "max_tokens") if config[f] != configs[0][f]]
        if config["env"] != args.env or differ:
            raise UsageError(
                f"{path} was trained with another {differ[0] if differ else 'env'}: compare like with like"
            )
    if not configs:
        return {"base": [Policy(args.base())]}, args
    given = {"env_args": list(args.env_args), "history": args.history}
    for name, value in given.items():
        if value and value != configs[0][name]:
            raise UsageError(f"--{name.replace('_', '-')} is the run's own, {configs[0][name]!r}: leave it out")
    args = replace(args, history=configs[0]["history"], max_tokens=configs[0]["max_tokens"],
                   env_args=tuple(configs[0]["env_args"]))  # fmt: skip

    ignored = {"seed", "base", "model", "name", "out", "resume", "save_every", "micro_batch", "sample_batch", "probe"}
    arms: dict[str, list[tuple]] = {}
    for path, config in zip(paths, configs, strict=True):
        settings = json.dumps({k: v for k, v in config.items() if k not in ignored}, sort_keys=True)
        arms.setdefault(settings, []).append((config, path))
    labels = [run_label(runs[0][0]) for runs in arms.values()]
    groups, pairing = {}, None
    for label, runs in zip(labels, arms.values(), strict=True):
        runs.sort(key=lambda run: (run[0]["base"], run[0]["seed"]))
        now = [(config["base"], config["seed"]) for config, _ in runs]
        if len(set(now)) < len(now):
            raise UsageError(f"{' and '.join(str(p) for _, p in runs)} are the same experiment with the same seed")
        if pairing is not None and now != pairing:
            raise UsageError(
                f"every way of training needs the same bases and seeds to be compared: {label} has {len(now)} of them "
                f"({', '.join(f'{Path(b).name} seed {s}' for b, s in now)}), the first has "
                f"{', '.join(f'{Path(b).name} seed {s}' for b, s in pairing)}"
            )
        pairing = now
        if labels.count(label) > 1:
            label = " ".join(path.name for _, path in runs)
        groups[label] = [Policy(config["base"], path) for config, path in runs]
    if "base" in models:
        groups = {"base": [Policy(base) for base, _ in pairing]} | groups
    return groups, args


def standard_pairs(labels: list[str]) -> Pairs:
    """What one wants to know: everything against the first (the base), BudgetMix against its full-budget twin, and step
    rewards against none."""
    pairs = [(label, labels[0]) for label in labels[1:]]
    for part in (" + BudgetMix", " + oracle", " + judge"):
        pairs += [(x, x.replace(part, "")) for x in labels if part in x and x.replace(part, "") in labels]
    return list(dict.fromkeys(pairs))


@dataclass
class Args(Settings):
    """Measure the base model and trained runs with K attempts and T turns, and compare them."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ("base",)
    """"base" and run folders. Runs that differ only in their seed are repetitions and come under one name."""


def report(groups: Groups, settings: Settings, folder: Path, pairs: Pairs) -> tuple[Comparison, str]:
    """Measure, and write table.md, table.csv, pass_at_k.png, pass_at_t.png and surface.png into a folder."""
    result = compare(groups, settings)
    table = f"{result.table(pairs)}\n\n{result.curve_table(pairs)}"
    make_folder(folder)
    (folder / "table.md").write_text(table + "\n")
    result.write_csv(folder / "table.csv", pairs)
    result.plot(folder / "pass_at_t.png", [list(groups)])
    result.plot_breadth(folder / "pass_at_k.png")
    result.plot_surface(folder / "surface.png", pairs)
    return result, table


def main(args: Args) -> None:
    args.check()
    groups, args = read_models(args.models, args)
    folder = args.out / "evaluation"
    _, table = report(groups, args, folder, standard_pairs(list(groups)))
    print(f"\n{table}\n\ntable.md, table.csv, pass_at_k.png, pass_at_t.png and surface.png lie in {folder}/")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
