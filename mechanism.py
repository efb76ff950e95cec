"""Which behaviour costs turns, and who learns it? What stands behind a budget effect on FrozenLake, in one picture.

That full-budget RL gains little at a tight budget is a number; why is a question about behaviour. Three things are read off
trajectories of each policy, played anew at 25, 50 and 100 % of T_max and sampled as in every evaluation:

- *action shares by turns left*: how often a turn is spent on the action that costs turns (brace, look; on the paper's own
  map, which has neither, a move that is not aimed at a cell nearer to the goal), over two turns at a time: who braces before
  every move does so in every second one. A policy that reads the budget shows a slope here, one that ignores it a level, but
  for slow games, which are over-represented late.
- *path length against the shortest*: the turns of a successful trajectory divided by the fewest possible moves, split by what
  they were spent on.
- *falls against time-outs*: a hasty policy ends in a hole, a patient one out of turns.

    python analysis.py mechanism base runs/frozenlake-brace/grpo-* --env frozenlake-brace
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from comparison import FEWEST_TASKS, interval_of, markdown
from envs import UsageError
from envs.frozenlake import MOVES, FrozenLake, aims_closer
from evaluate import TEST_SEED, Groups, budgets_of
from plots import Cell, curve, panels, save
from rollout import Trajectory, Turn
from step_quality import play_held_out

PERCENTS = (25, 50, 100)
ENDS = {"success": ("goal", "#009E73"), "failure": ("hole", "#D55E00"), "budget": ("out of turns", "#56B4E9"),
        "context": ("out of context", "#999999")}  # fmt: skip
PURPOSES = {"closer": "#0072B2", "elsewhere": "#E69F00", "brace": "#CC79A7", "look": "#CC79A7", "invalid": "#999999"}


def purpose(trajectory: Trajectory, turn: Turn) -> str:
    """What a turn was spent on: a move aimed "closer" to the goal or "elsewhere", an action that is no move by its own
    name, or an "invalid" answer."""
    if not turn.valid:
        return "invalid"
    action = turn.action.strip().lower()
    if action not in MOVES:
        return action
    cell = turn.state[0] if isinstance(turn.state, tuple) else turn.state  # variants remember more than the cell
    return "closer" if aims_closer(trajectory.task.data, cell, action) else "elsewhere"


@dataclass
class Watched:
    """What the policies of one label did at one budget. Rows are trajectories; `turns` holds for each the purpose of every
    turn, first to last."""

    budget: int
    costly: str  # the purpose that costs turns
    bases: list
    run: list[int] = field(default_factory=list)
    task: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    shortest: list[int] = field(default_factory=list)
    turns: list[list[str]] = field(default_factory=list)

    def share(self, wanted: str, turns_left: int) -> Cell:
        """Share of the turns played with so many turns left, or one fewer, that were spent on one purpose; tasks and runs are
        resampled."""
        first = self.budget - turns_left
        hits = [(i, float(p == wanted)) for i, turns in enumerate(self.turns) for p in turns[first : first + 2]]
        run, task = (np.array([column[i] for i, _ in hits], dtype=int) for column in (self.run, self.task))
        return interval_of(np.array([hit for _, hit in hits]), run, task, self.bases, (0, 1))

    def lengths(self) -> dict[str, float]:
        """Turns of a successful trajectory divided by the fewest possible, on average, by purpose: their sum is 1 for a
        policy that takes a shortest path without slips. NaN without a success."""
        won = [
            (Counter(t), s) for t, s, end in zip(self.turns, self.shortest, self.ends, strict=True) if end == "success"
        ]
        return {p: float(np.mean([c[p] / s for c, s in won])) if won else float("nan") for p in PURPOSES}

    def spent(self) -> dict[str, float]:
        """Share of all turns by purpose."""
        counts = Counter(p for turns in self.turns for p in turns)
        return {p: counts[p] / max(1, counts.total()) for p in PURPOSES}

    def endings(self) -> dict[str, float]:
        """Share of the trajectories by how they ended."""
        return {end: self.ends.count(end) / len(self.ends) for end in ENDS}


def watch(groups: Groups, args) -> dict[str, dict[int, Watched]]:
    """{label: {percent: what its policies did at that budget}}, over `args.trajectories` trajectories a task.

    Raises UsageError where there is no map to read a purpose off.
    """
    env = args.new_env()
    if not isinstance(env, FrozenLake):
        raise UsageError(f"the mechanism is read off FrozenLake's maps, {env.name} has none")
    tasks = env.tasks(args.split, args.eval_tasks, TEST_SEED)
    number = {task.id: i for i, task in enumerate(tasks)}
    budgets = dict(zip(PERCENTS, budgets_of(env.max_turns, PERCENTS), strict=True))
    costly = next(iter(env.actions[len(MOVES) :]), "elsewhere")
    results = {}
    for label, policies in groups.items():
        bases = [str(policy.base) for policy in policies]
        results[label] = {percent: Watched(budget, costly, bases) for percent, budget in budgets.items()}
        # Trainings on one base have it in common: it plays once, and counts for each of them.
        for policy in tqdm(dict.fromkeys(policies), desc=f"watching {label}", unit="policy"):
            engine, runs = policy.engine(args), [run for run, own in enumerate(policies) if own == policy]
            for watched in results[label].values():
                played = play_held_out(engine, tasks, watched.budget, args.trajectories, args)
                for run, t in product(runs, played):
                    watched.run.append(run)
                    watched.task.append(number[t.task.id])
                    watched.ends.append(t.stop)
                    watched.shortest.append(env.min_turns(t.task))
                    watched.turns.append([purpose(t, turn) for turn in t.turns])
    return results


def met(results: dict[str, dict[int, Watched]]) -> list[str]:
    """The purposes that turns were spent on, or could have been, in the order of PURPOSES."""
    all_watched = [w for found in results.values() for w in found.values()]
    played = {p for w in all_watched for turns in w.turns for p in turns} | {w.costly for w in all_watched}
    return [p for p in PURPOSES if p in played]


def plot_mechanism(path: Path, results: dict[str, dict[int, Watched]]) -> None:
    """A column for each budget; rows: the share of the action that costs turns by turns left, path lengths, endings."""
    purposes = {p: (p, PURPOSES[p]) for p in met(results)}
    what = next(iter(results.values()))[PERCENTS[0]].costly
    out_of_context = any("context" in w.ends for found in results.values() for w in found.values())  # hardly ever
    ends = {end: look for end, look in ENDS.items() if end != "context" or out_of_context}
    figure, axes = panels(3, len(PERCENTS), width=3.6, height=2.5, sharey="row")
    for column, percent in enumerate(PERCENTS):
        shares, lengths, endings = axes[:, column]
        for style, (label, found) in enumerate(results.items()):
            watched = found[percent]
            cells = {left: watched.share(what, left) for left in range(watched.budget, 0, -2)}
            known = {left - 0.5 * (left > 1): cell for left, cell in cells.items() if not np.isnan(cell).any()}
            curve(shares, list(known), list(known.values()), style, label)
        watched = [found[percent] for found in results.values()]
        stacked(lengths, [w.lengths() for w in watched], purposes)
        stacked(endings, [{end: 100 * share for end, share in w.endings().items()} for w in watched], ends)
        budget = watched[0].budget
        shares.set(title=f"T = {budget} ({percent} %)", xlabel="turns left", ylim=(-0.03, 1.03))
        shares.set_xlim(budget + 0.5, 0.5)  # time runs to the right
        lengths.axhline(1, color="black", lw=0.8, ls=":")
        if what == "brace":
            shares.axhline(0.5, color="black", lw=0.8, ls=":", label="before every move")
        shares.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (lengths, endings):
            axis.set_xticks(range(len(results)), [label.replace(" + ", "\n+ ") for label in results])
    longest = np.nanmax([1.0, *(sum(found[p].lengths().values()) for found in results.values() for p in PERCENTS)])
    axes[1, 0].set_ylim(0, 1.05 * longest)
    axes[0, 0].set_ylabel(f"share of turns: {what}")
    axes[1, 0].set_ylabel("turns of a success /\nfewest possible moves")
    axes[2, 0].set_ylabel("trajectories, %")
    for row in axes:
        if row[-1].get_legend_handles_labels()[0]:
            row[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    save(
        figure,
        path,
        "closer, elsewhere: moves, by where they are aimed; top: two turns at a time, with 95 % intervals, where "
        f"{FEWEST_TASKS} tasks or more were still being played; middle: successes only",
    )


def stacked(axis, bars: list[dict[str, float]], parts: dict[str, tuple[str, str]]) -> None:
    """Bars of parts on top of each other; `parts` gives the name and the colour of each key, bottom first."""
    floor = np.zeros(len(bars))
    for key, (name, color) in parts.items():
        heights = np.nan_to_num([bar[key] for bar in bars])
        axis.bar(range(len(bars)), heights, bottom=floor, width=0.7, color=color, label=name)
        floor += heights


def mechanism_table(results: dict[str, dict[int, Watched]]) -> str:
    rows, purposes = {}, met(results)
    for percent in PERCENTS:
        for label, found in results.items():
            watched = found[percent]
            spent, ends, length = watched.spent(), watched.endings(), sum(watched.lengths().values())
            rows[f"T={watched.budget} ({percent}%): {label}"] = [
                *(f"{spent[p]:.1%}" for p in purposes),
                "none" if np.isnan(length) else f"{length:.2f}",
                *(f"{ends[end]:.1%}" for end in ENDS),
            ]
    header = [*purposes, "turns of a success / fewest moves", *(name for name, _ in ENDS.values())]
    return "\n".join(markdown("shares of turns, and endings", header, rows))
