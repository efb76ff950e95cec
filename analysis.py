"""What did RL really improve? Every analysis of paper A, for trained runs against their base, as numbers and pictures.

    python analysis.py quality    base runs/full --env frozenlake      step quality at matched states (Figures 4, 19, 21)
    python analysis.py errors     base runs/full --env frozenlake      the same right after an error (Figures 5, 20, 22)
    python analysis.py depth      base runs/full --env frozenlake      ... and along the trajectory (Figure 6)
    python analysis.py likelihood base runs/full --env frozenlake      action NLL and cumulative LLR (Figures 7, 23)
    python analysis.py dynamics   runs/full runs/mix                   R_multi and R_single in training (Figures 8, 24)
    python analysis.py report     base runs/full runs/mix --env frozenlake      all of it, and Pass@(K,T), on one page

How states are drawn and judged stands in step_quality.py, the likelihoods in likelihood.py, Pass@(K,T) in evaluate.py.
This file asks those questions of every run, draws, and decides for each finding of the paper what this data say about
it. The decision is a rule, not an opinion: a finding is a number with a direction, *seen* when its whole 95 % interval
lies on the paper's side, *not seen* when it lies on the other, *inconclusive* when zero is inside.

Any number of runs can be given. Runs that differ in their seed alone are repetitions, and intervals then resample base
models and trainings too.
"""

import shlex
import sys
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

import evaluate
import findings
from comparison import fine, markdown
from envs import UsageError
from evaluate import TEST_SEED, Groups, HeldOut, Policy, budgets_of, group_runs, read_models, standard_pairs
from likelihood import Likelihoods, at_progress, llr_cells, matched_llr, over_tasks, plausible, score_trajectories
from plots import curve, panels, save
from process_rewards import has_oracle
from rollout import run_cli
from runs import make_folder
from step_quality import (
    Curves,
    Matched,
    action_qualities,
    continuations,
    draw_pool,
    error_states,
    play_held_out,
    read_probes,
)

BETTER, WORSE = "#D55E00", "#009E73"  # as in the paper's scatter plots: red for RL, teal for the base
POINTS = 10  # at which cumulative LLRs are read off


# ---- the arguments ----


@dataclass
class Shared(HeldOut):
    """What all analyses of trained models need."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """"base" and run folders. Runs that differ only in their seed are repetitions and come under one name."""
    trajectories: int = 4
    """Trajectories per map and policy that states are drawn from, or that are scored."""
    percent: int = 100
    """Their budget, in percent of T_max."""

    def check(self) -> None:
        super().check()
        if not 1 <= self.percent <= 100 or self.trajectories < 1:
            raise UsageError("percent must lie between 1 and 100, trajectories be at least 1")


@dataclass
class Quality(Shared):
    """Quality of single actions at matched states, base against trained (paper A, 3.3 and Figures 4, 19, 21)."""

    states: int = 512
    """States in the pool of each run, half of them from base trajectories."""
    group: int = 16
    """Actions sampled from each policy at each state (paper A's G)."""

    def check(self) -> None:
        super().check()
        if self.states < 2 or self.group < 1:
            raise UsageError("a pool needs at least 2 states, and each at least one action (--states, --group)")


@dataclass
class Depth(Quality):
    """Quality of single actions against depth t / T_max (paper A, 3.3 and Figure 6)."""


@dataclass
class Errors(Quality):
    """Quality of the action after an injected error, and success from there (paper A, B.5 and Figures 5, 20, 22)."""

    continuations: int = 4
    """How often each policy goes on from each error state, with the remaining budget."""

    def check(self) -> None:
        super().check()
        if self.continuations < 1:
            raise UsageError(f"continuations must be at least 1, not {self.continuations}")


@dataclass
class Likelihood(Shared):
    """Action likelihoods under the base, and log-likelihood ratios of whole trajectories (paper A, 4.1 and E.2)."""


@dataclass
class Dynamics:
    """R_multi and R_single during training, of runs trained with --probe (paper A, 4.2 and E.3)."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run folders."""
    out: Path = Path("runs")
    """Folder that the picture is written to, in analysis/."""


@dataclass
class Report(Errors, evaluate.Settings):
    """Every analysis and Pass@(K,T) on one Markdown page, with a verdict for each finding of the paper."""

    n: int = 128
    """Trajectories per map at the full budget, of which Pass@K is computed for K up to n."""
    surface_n: int = 32
    """Trajectories per map at each smaller budget."""
    percents: tuple[int, ...] = (10, 25, 50, 75, 100)
    """Budgets, in percent of T_max."""
    name: str = "report"
    """Name of the folder inside `out`."""


# ---- collecting ----


def examine(policy: Policy, args, parts: tuple[str, ...]) -> dict:
    """Ask the questions in `parts` ("quality", "errors", "likelihood") of one run and its base.

    Everything is asked of one loaded model, with the adapter off (the base) and on. Where the environment has no exact
    action values, only recovery from errors remains of the first two.
    """
    engine, env = policy.engine(args), args.new_env()
    tasks = env.tasks(args.split, args.eval_tasks, TEST_SEED)
    (budget,) = budgets_of(env.max_turns, (args.percent,))
    number = {task.id: i for i, task in enumerate(tasks)}
    shown = {"max_tokens": args.max_tokens, "history": args.history}

    def off_and_on(ask):
        with engine.policy.disable_adapter():
            base = ask()
        return base, ask()

    def matched(states, base, trained) -> Matched:
        index = {"run": np.zeros(len(states), dtype=int), "task": np.array([number[s.task.id] for s in states])}
        depth = np.array([s.spent / env.max_turns for s in states])
        return Matched(base, trained, **index, depth=depth, bases=[str(policy.base)])

    played = off_and_on(lambda: play_held_out(engine, args.new_env, tasks, budget, args.trajectories, **shown))
    found = {}
    exact = has_oracle(env)
    if "quality" in parts and exact:
        pool = draw_pool(list(played), args.states, args.history, seed=0)
        asked = off_and_on(lambda: action_qualities(engine, pool, args.new_env, args.group, **shown, seed=0))
        found["quality"] = matched(pool, *asked)
    if "errors" in parts:
        pool = error_states(list(played), args.states, args.new_env, engine.codec, args.history, seed=0)
        if not pool:
            raise UsageError("no error state was found: play longer trajectories (--percent), or more (--trajectories)")
        if exact:
            asked = off_and_on(lambda: action_qualities(engine, pool, args.new_env, args.group, **shown, seed=1))
            found["errors"] = matched(pool, *asked)
        asked = off_and_on(lambda: continuations(engine, pool, args.new_env, args.continuations, **shown, seed=2))
        found["recovery"] = matched(pool, *asked)
    if "likelihood" in parts:
        base, trained = (score_trajectories(engine.policy, side, engine.pad) for side in played)
        found["likelihood"] = Likelihoods([base], [trained], [str(policy.base)])
    return found


def collect(groups: Groups, args, parts: tuple[str, ...]) -> dict[str, dict]:
    """{label: {part: results of all its runs}} for every trained label."""
    found = {}
    trained = {label: policies for label, policies in groups.items() if label != "base"}
    with tqdm(total=sum(map(len, trained.values())), desc="analysing", unit="run") as bar:
        for label, policies in trained.items():
            runs = []
            for policy in policies:  # one model in memory at a time
                runs.append(examine(policy, args, parts))
                bar.update()
            found[label] = {part: reduce(lambda a, b: a.join(b), (run[part] for run in runs)) for part in runs[0]}
    return found


# ---- pictures and tables ----


def plot_scatter(path: Path, results: dict[str, Matched], where: str = "matched states") -> None:
    """Base quality against trained quality, a point per state; above the diagonal the trained policy is better."""
    figure, (axes,) = panels(1, len(results), width=3.5, height=3.9, sharey=True)
    for axis, (label, m) in zip(axes, results.items(), strict=True):
        better, tied, worse = m.shares()
        colors = np.where(m.difference > 1e-9, BETTER, np.where(m.difference < -1e-9, WORSE, "#999999"))
        axis.plot([0, 1], [0, 1], color="#555555", lw=1, ls="--", zorder=1)
        axis.scatter(m.base, m.trained, c=colors, s=9, alpha=0.45, lw=0)
        axis.set(xlabel="base: mean quality of 1 action", xlim=(-0.03, 1.03), ylim=(-0.03, 1.09))
        axis.set_box_aspect(1)
        axis.set_title(f"{label}\nbetter {better:.0%}, tied {tied:.0%}, worse {worse:.0%}", fontsize=10)
        axis.text(0.03, 0.97, f"{where}, n = {len(m.base)}", fontsize=8, transform=axis.transAxes, va="top")
    axes[0].set_ylabel("trained: mean quality of 1 action")
    save(figure, path)


def quality_table(results: dict[str, Matched], what: str = "matched states") -> str:
    rows = {}
    for label, m in results.items():
        better, tied, worse = m.shares()
        means = [f"{m.cell(values)[0]:.3f}" for values in (m.base, m.trained)]
        rows[label] = [
            str(len(m.base)),
            *means,
            fine(m.cell(m.difference)),
            *(f"{x:.1%}" for x in (better, tied, worse)),
        ]
    header = ["states", "base", "trained", "trained - base", "better", "tied", "worse"]
    return "\n".join(markdown(what, header, rows))


def depth_bins(m: Matched, bins: int = 8) -> list[tuple[float, np.ndarray]]:
    """(centre, which states) of the bins of t / T_max that hold states of several maps."""
    index = np.minimum((m.depth * bins).astype(int), bins - 1)
    return [((b + 0.5) / bins, index == b) for b in range(bins) if len(set(m.task[index == b])) > 1]


def plot_depth(path: Path, results: dict[str, Matched]) -> None:
    """Quality of base and trained actions against depth, and their difference below."""
    figure, axes = panels(2, len(results), width=3.4, height=2.2, sharex=True, sharey="row")
    for column, (label, m) in enumerate(results.items()):
        bins = depth_bins(m)
        x = [centre for centre, _ in bins]
        for style, (name, values) in enumerate({"base": m.base, "trained": m.trained}.items()):
            curve(axes[0, column], x, [m.cell(values, where) for _, where in bins], style, name)
        curve(axes[1, column], x, [m.cell(m.difference, where) for _, where in bins], 2, "trained - base")
        axes[1, column].axhline(0, color="#555555", lw=1)
        axes[0, column].set(title=label, xlim=(0, 1), ylim=(0, 1))
        axes[1, column].set_xlabel(r"depth $t\,/\,T_{max}$")
    axes[0, 0].set_ylabel("mean quality of 1 action")
    axes[1, 0].set_ylabel("difference")
    axes[0, -1].legend(loc="lower left")
    save(figure, path)


def depth_table(results: dict[str, Matched]) -> str:
    rows = {label: [fine(m.cell(m.difference, half)) for half in m.halves()] + [fine(m.late_gain())]
            for label, m in results.items()}  # fmt: skip
    header = ["first half (t < T_max / 2)", "second half", "second - first"]
    return "\n".join(markdown("trained - base", header, rows))


def plot_likelihood(path: Path, results: dict[str, Likelihoods]) -> None:
    """Per trained label: box plots of action NLL under the base, the growth of the LLR, and the length-matched pairs."""
    figure, axes = panels(len(results), 3, width=3.4, height=2.5)
    for (boxes, growth, pairs), (label, result) in zip(axes, results.items(), strict=True):
        sides = {"base": result.base, "trained": result.trained}
        nll = [np.concatenate([s.nll for run in side for s in run]) for side in sides.values()]
        drawn = boxes.boxplot(nll, widths=0.6, showfliers=False, patch_artist=True, tick_labels=list(sides),
                              showmeans=True, medianprops={"color": "black"})  # fmt: skip
        for box, color in zip(drawn["boxes"], ("#56B4E9", "#CC79A7"), strict=True):
            box.set_facecolor(color)
        boxes.set(ylabel="action NLL under base, nats", title=f"{label}: {', '.join(str(len(x)) for x in nll)} actions")
        x = np.arange(1, POINTS + 1) / POINTS
        for style, (name, side) in enumerate(sides.items()):
            cells = [llr_cells(side, result.bases, lambda s, p=p: at_progress(s.llr, POINTS)[p]) for p in range(POINTS)]
            curve(growth, x, cells, style, f"{name} trajectories")
        growth.axhline(0, color="#555555", lw=1)
        growth.set(xlabel="share of the trajectory", ylabel="cumulative LLR, nats", title="successful trajectories")
        growth.legend()
        (mean, low, high), count = matched_llr(result)
        pairs.bar([0], [mean], width=0.5, color="#0072B2", alpha=0.7)
        pairs.errorbar([0], [mean], [[mean - low], [high - mean]], color="black", capsize=6)
        pairs.axhline(0, color="#555555", lw=1)
        pairs.set(xticks=[0], xticklabels=["trained - base"], xlim=(-1, 1), ylabel="LLR difference, nats",
                  title=f"length-matched, {count} pairs")  # fmt: skip
    save(figure, path)


def likelihood_table(results: dict[str, Likelihoods]) -> str:
    rows = {}
    for label, result in results.items():
        for name, side in (("base", result.base), ("trained", result.trained)):
            per_action = [[(s.trajectory.task.id, x) for s in run for x in s.nll] for run in side]
            per_token = [[(s.trajectory.task.id, x) for s in run for x in s.nll / s.action_tokens] for run in side]
            won = sum(s.trajectory.success for run in side for s in run)
            rows[f"{label}: {name}"] = [*(fine(over_tasks(x, result.bases), "") for x in (per_action, per_token)), str(won),
                                        fine(llr_cells(side, result.bases, lambda s: s.llr[-1]), "")]  # fmt: skip
    header = ["NLL per action", "NLL per action token", "successful trajectories", "their LLR"]
    lines = markdown("nats; trajectories of", header, rows)
    rows = {
        label: [fine(matched_llr(r)[0]), str(matched_llr(r)[1]), fine(plausible(r), "")] for label, r in results.items()
    }
    header = ["LLR, trained - base", "pairs", "actions within the base's central 95 % of NLL"]
    return "\n".join([*lines, *markdown("length-matched", header, rows)])


def plot_dynamics(path: Path, curves: dict[str, Curves]) -> None:
    figure, ((multi, single),) = panels(1, 2, height=3.0)
    for style, (label, c) in enumerate(curves.items(), 1):
        curve(multi, c.steps, c.cells("multi"), style, label)
        curve(single, c.steps, c.cells("single"), style, label)
    multi.set(title=r"$R_{multi}$: whole trajectories", xlabel="training step", ylabel="held-out tasks solved at T_max")
    single.set(title=r"$R_{single}$: one action at fixed base states", xlabel="training step", ylabel="mean quality")
    multi.legend(loc="lower right")
    save(figure, path)


def dynamics_table(curves: dict[str, Curves]) -> str:
    rows = {}
    for label, c in curves.items():
        changes = [fine(c.cells(name, since=0)[-1]) for name in ("multi", "single")]
        rows[label] = [f"{c.cells(name)[i][0]:.3f}" for name in ("multi", "single") for i in (0, -1)] + changes
        rows[label] = [rows[label][i] for i in (0, 1, 4, 2, 3, 5)]
    header = ["R_multi at first", "at last", "change", "R_single at first", "at last", "change"]
    return "\n".join(markdown("held-out tasks", header, rows))


# ---- the commands ----


def groups_of(args) -> tuple[Groups, Shared]:
    """The policies to analyse, checked. Raises UsageError when there is no trained run among the models."""
    if set(args.models) <= {"base"}:
        raise UsageError("name at least one trained run, for example: base runs/frozenlake-grpo-s0")
    groups, args = read_models(args.models, args)
    args.check()
    return groups, args


SECTIONS = {  # title, and how to read it
    "quality": (
        "Step quality at matched states",
        "Each point is a state, met by base or trained trajectories in equal shares; its coordinates are the mean exact "
        "quality of {args.group} actions of each policy there. Brackets resample whole maps.",
    ),
    "depth": ("Step quality along the trajectory", "The same states by turns played, t / T_max."),
    "errors": (
        "Right after an error",
        "A random action was played at a random state; kept if the distance to the goal grew. Then each policy took "
        "{args.group} actions, and went on {args.continuations} times with the turns that were left.",
    ),
    "likelihood": (
        "Likelihoods",
        "Recorded tokens, scored at temperature 1 by one model with the adapter off (base) and on. LLR: log-likelihood "
        "ratio, trained to base, of all responses of a successful trajectory; pairs: same map, token counts within 10 %.",
    ),
    "dynamics": (
        "Training dynamics",
        "R_multi: success on held-out maps at the full budget. R_single: mean quality of 8 actions at each state of one "
        "fixed pool of base states, the same for all runs of a base.",
    ),
}


def draw(section: str, folder: Path, found: dict[str, dict], curves: dict[str, Curves]) -> str | None:
    """Write one section's picture into a folder and return its table as Markdown; None where nothing was measured."""
    picture = folder / f"{section}.png"
    part = "quality" if section == "depth" else section
    results = {label: parts[part] for label, parts in found.items() if part in parts}
    if section == "errors":
        recovery = {label: parts["recovery"] for label, parts in found.items()}
        # Without exact action values the success that followed is all there is to be drawn.
        plot_scatter(picture, results or recovery, "after an error")
        quality = quality_table(results, "quality after an error") + "\n" if results else ""
        return quality + quality_table(recovery, "success from there")
    if section == "dynamics" and curves:
        plot_dynamics(picture, curves)
        return dynamics_table(curves)
    if not results:
        return None
    plot, tabulate = {
        "quality": (plot_scatter, quality_table),
        "depth": (plot_depth, depth_table),
        "likelihood": (plot_likelihood, likelihood_table),
    }[section]
    plot(picture, results)
    return tabulate(results)


PARTS = {Quality: "quality", Depth: "quality", Errors: "errors", Likelihood: "likelihood"}


def analyse(args) -> None:
    """One analysis: its picture into `out`/analysis, its numbers onto the screen and beside it."""
    section = type(args).__name__.lower()
    if isinstance(args, Dynamics):
        if "base" in args.models or not args.models:
            raise UsageError("name the runs that were trained with --probe, without base")
        arms = group_runs([Path(run) for run in args.models])
        found, curves = {}, {label: read_probes([path for _, path in runs]) for label, runs in arms.items()}
    else:
        groups, args = groups_of(args)
        if PARTS[type(args)] == "quality" and not has_oracle(args.new_env()):
            raise UsageError(f"{args.new_env().name} has no exact action values: step quality cannot be measured on it")
        found, curves = collect(groups, args, (PARTS[type(args)],)), {}
    folder = make_folder(args.out / "analysis")
    table = draw(section, folder, found, curves)
    (folder / f"{section}.md").write_text(table)
    print(f"\n{table}\n{section}.md and {section}.png lie in {folder}/")


def report(args: Report) -> None:
    """Everything on one page."""
    groups, args = groups_of(args)
    if "base" not in groups:
        raise UsageError("a report compares with the base: name it too, for example: base runs/frozenlake-grpo-s0")
    folder = make_folder(args.out / args.name)
    pairs = standard_pairs(list(groups))
    result, table = evaluate.report(groups, args, folder, pairs)
    found = collect(groups, args, ("quality", "errors", "likelihood"))
    runs = {label: [policy.run for policy in policies] for label, policies in groups.items() if label != "base"}
    curves = {label: read_probes(own) for label, own in runs.items() if all((r / "probe.jsonl").exists() for r in own)}
    verdicts = findings.table(findings.judge(result, found, curves))

    lines = [
        f"# What did RL improve? {args.new_env().name}: {', '.join(groups)}",
        "",
        f"Made by `python analysis.py {shlex.join(sys.argv[1:])}`.",
        "",
        f"Game options: {' '.join(args.env_args) or 'the defaults'}; T_max {args.new_env().max_turns}; {args.eval_tasks} "
        f"{args.split} maps; {len(result.bases)} run{'s' * (len(result.bases) > 1)} of each kind; temperature 0.6, "
        "top-p 0.9; all intervals are 95 %, from a bootstrap.",
        "",
        "## The findings of the paper",
        "",
        findings.RULE,
        "",
        verdicts,
        "",
        "## Pass@(K,T)",
        "",
        *(f"![{name}]({name})\n" for name in ("pass_at_k.png", "pass_at_t.png", "surface.png")),
        table,
    ]
    for section, (title, note) in SECTIONS.items():
        shown = draw(section, folder, found, curves)
        if shown is None:
            missing = "no run was trained with `--probe`" if section == "dynamics" else "no exact action values here"
            lines += ["", f"## {title}", "", f"Not measured: {missing}."]
        else:
            picture = f"![{title}]({section}.png)"
            lines += ["", f"## {title}", "", picture, "", shown.rstrip(), "", note.format(args=args)]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(f"\n{verdicts}\n\neverything is in {folder}/report.md")


def main(args) -> None:
    report(args) if isinstance(args, Report) else analyse(args)


Args = (
    Annotated[Quality, tyro.conf.subcommand("quality")]
    | Annotated[Errors, tyro.conf.subcommand("errors")]
    | Annotated[Depth, tyro.conf.subcommand("depth")]
    | Annotated[Likelihood, tyro.conf.subcommand("likelihood")]
    | Annotated[Dynamics, tyro.conf.subcommand("dynamics")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)

if __name__ == "__main__":
    run_cli(Args, main, __doc__)
