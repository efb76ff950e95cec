"""What did RL really improve? Every analysis of paper A, for trained runs against their base, as numbers and pictures.

    python analysis.py quality    base runs/full --env frozenlake      step quality at matched states (Figures 4, 19, 21)
    python analysis.py errors     base runs/full --env frozenlake      the same right after an error (Figures 5, 20, 22)
    python analysis.py depth      base runs/full --env frozenlake      ... and along the trajectory (Figure 6)
    python analysis.py likelihood base runs/full --env frozenlake      action NLL and cumulative LLR (Figures 7, 23)
    python analysis.py dynamics   runs/full runs/mix                   R_multi and R_single in training (Figures 8, 24)
    python analysis.py mechanism  base runs/full runs/mix              what turns are spent on, at each budget (FrozenLake)
    python analysis.py report     base runs/full runs/mix --env frozenlake      all of it, and Pass@(K,T), on one page

This file only asks and writes down. What is asked stands in step_quality.py, likelihood.py, dynamics.py, mechanism.py and
evaluate.py, and what the answers say about the paper's findings in findings.py.

Any number of runs can be given. Runs that differ in their seed alone are repetitions, and intervals then resample base
models and trainings too.
"""

import shlex
import sys
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

import evaluate
import findings
from dynamics import Curves, dynamics_table, plot_dynamics, read_probes
from envs import UsageError
from envs.frozenlake import FrozenLake
from evaluate import TEST_SEED, Groups, HeldOut, Policy, budgets_of, group_runs, read_models, standard_pairs
from likelihood import Likelihoods, likelihood_table, plot_likelihood, score_trajectories
from mechanism import Watched, mechanism_table, plot_mechanism, watch
from process_rewards import has_oracle
from rollout import run_cli
from runs import check_name, make_folder
from step_quality import (
    Matched,
    action_qualities,
    continuations,
    depth_table,
    draw_pool,
    error_states,
    play_held_out,
    plot_depth,
    plot_errors,
    plot_scatter,
    quality_table,
)

# ---- the arguments ----


@dataclass
class Played(HeldOut):
    """What all analyses of trained models need."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """"base" and run folders. Runs that differ only in their seed are repetitions and come under one name."""
    trajectories: int = 4
    """Trajectories per task and policy that states are drawn from, or that are scored."""

    def check(self) -> None:
        super().check()
        if self.trajectories < 1:
            raise UsageError(f"trajectories must be at least 1, not {self.trajectories}")


@dataclass
class Shared(Played):
    """What the analyses at one budget need."""

    percent: int = 100
    """The budget of the trajectories, in percent of T_max."""

    def check(self) -> None:
        super().check()
        if not 1 <= self.percent <= 100:
            raise UsageError(f"percent must lie between 1 and 100, not {self.percent}")


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

    micro_batch: int = 64
    """Distinct (prompt, response) sequences per forward pass; lower it when a large model runs out of memory."""

    def check(self) -> None:
        super().check()
        if self.micro_batch < 1:
            raise UsageError(f"micro_batch must be at least 1, not {self.micro_batch}")


@dataclass
class Dynamics:
    """R_multi and R_single during training, of runs trained with --probe (paper A, 4.2 and E.3)."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run folders."""
    out: Path = Path("runs")
    """Folder that the picture is written to, in analysis/."""


@dataclass
class Mechanism(Played):
    """What turns are spent on and how trajectories end, at 25, 50 and 100 % of T_max, on FrozenLake (mechanism.py)."""


@dataclass
class Report(Errors, Likelihood, evaluate.Settings):
    """Every analysis and Pass@(K,T) on one Markdown page, with a verdict for each finding of the paper."""

    n: int = 128
    """Trajectories per task at the full budget, of which Pass@K is computed for K up to n."""
    surface_n: int = 32
    """Trajectories per task at each smaller budget."""
    percents: tuple[int, ...] = (10, 25, 50, 75, 100)
    """Budgets, in percent of T_max."""
    name: str = "report"
    """Name of the folder inside `out`."""

    def check(self) -> None:
        super().check()
        check_name(self.name, self.out)


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

    def off_and_on(ask):
        with engine.base():
            base = ask()
        return base, ask()

    def matched(states, base, trained) -> Matched:
        index = {"run": np.zeros(len(states), dtype=int), "task": np.array([number[s.task.id] for s in states])}
        depth = np.array([s.spent / env.max_turns for s in states])
        return Matched(base, trained, **index, depth=depth, bases=[str(policy.base)])

    played = off_and_on(lambda: play_held_out(engine, tasks, budget, args.trajectories, args))
    found, exact = {}, has_oracle(env)
    if "quality" in parts and exact:
        pool = draw_pool(list(played), args.states, args.history, seed=0)
        found["quality"] = matched(pool, *off_and_on(lambda: action_qualities(engine, pool, args, args.group, seed=0)))
    if "errors" in parts and (pool := error_states(list(played), args.states, engine, args, seed=0)):
        if exact:
            found["errors"] = matched(
                pool, *off_and_on(lambda: action_qualities(engine, pool, args, args.group, seed=1))
            )
        ends = off_and_on(lambda: continuations(engine, pool, args, args.continuations, seed=2))
        found["recovery"] = matched(pool, *ends)
    if "likelihood" in parts:
        engine.rest()  # log-probs of given tokens, with the adapter off and on, are Hugging Face's business
        whole = policy.engine(replace(args, engine="hf")) if engine.own_weights else engine
        base, trained = (score_trajectories(whole.policy, t, whole.pad, args.micro_batch) for t in played)
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
            parts_of_all = set.intersection(*map(set, runs))
            found[label] = {part: reduce(lambda a, b: a.join(b), (run[part] for run in runs)) for part in parts_of_all}
    return found


# ---- the commands ----


def groups_of(args) -> tuple[Groups, Played]:
    """The policies to analyse, checked. Raises UsageError when there is no trained run among the models."""
    if set(args.models) <= {"base"}:
        raise UsageError("name at least one trained run, for example: base runs/frozenlake/grpo-mix-s0")
    groups, args = read_models(args.models, args)
    args.check()
    return groups, args


SECTIONS = {  # title, and how to read it
    "quality": (
        "Step quality at matched states",
        "Each point is a state, met by base or trained trajectories in equal shares; its coordinates are the mean exact "
        "quality of {args.group} actions of each policy there. Brackets resample whole tasks.",
    ),
    "depth": ("Step quality along the trajectory", "The same states by turns played, t / T_max."),
    "errors": (
        "Right after an error",
        "A random action was played at a random state; kept if it set the game back (if the distance to the goal grew). "
        "Then each policy took {args.group} actions, and went on {args.continuations} times with the turns that were left.",
    ),
    "likelihood": (
        "Likelihoods",
        "Recorded tokens, scored at temperature 1 by one model with the adapter off (base) and on. LLR: log-likelihood "
        "ratio, trained to base, of all responses of a successful trajectory; pairs: same task, token counts within 10 %. An "
        "action of the embedded model is one token.",
    ),
    "dynamics": (
        "Training dynamics",
        "R_multi: success on held-out tasks at the full budget. R_single: mean quality of 8 actions at each state of one "
        "fixed pool of base states, the same for all runs of a base.",
    ),
    "mechanism": (
        "What turns are spent on",
        "Closer, elsewhere: moves, by where they are aimed. Each policy played {args.trajectories} trajectories a task and "
        "budget.",
    ),
}


def draw(
    section: str,
    folder: Path,
    found: dict[str, dict],
    curves: dict[str, Curves],
    watched: dict[str, dict[int, Watched]],
) -> str | None:
    """Write one section's picture into a folder and return its table as Markdown; None where nothing was measured."""
    picture = folder / f"{section}.png"
    part = "quality" if section == "depth" else section
    results = {label: parts[part] for label, parts in found.items() if part in parts}
    recovery = {label: parts["recovery"] for label, parts in found.items() if "recovery" in parts}
    if section == "errors" and recovery:
        plot_errors(picture, results, recovery)
        quality = quality_table(results, "quality after an error") + "\n" if results else ""
        return quality + quality_table(recovery, "success from there")
    if section == "dynamics" and curves:
        plot_dynamics(picture, curves)
        return dynamics_table(curves)
    if section == "mechanism" and watched:
        plot_mechanism(picture, watched)
        return mechanism_table(watched)
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
    found, curves, watched = {}, {}, {}
    if isinstance(args, Dynamics):
        if "base" in args.models or not args.models:
            raise UsageError("name the runs that were trained with --probe, without base")
        arms = group_runs([Path(run) for run in args.models])
        curves = {label: read_probes([path for _, path in runs]) for label, runs in arms.items()}
    elif isinstance(args, Mechanism):
        groups, args = groups_of(args)
        watched = watch(groups, args)
    else:
        groups, args = groups_of(args)
        if PARTS[type(args)] == "quality" and not has_oracle(args.new_env()):
            raise UsageError(f"{args.new_env().name} has no exact action values: step quality cannot be measured on it")
        found = collect(groups, args, (PARTS[type(args)],))
        if not any(found.values()):
            raise UsageError(f"no error state was found: {args.new_env().name} may not know what an error is")
    folder = make_folder(args.out / "analysis")
    table = draw(section, folder, found, curves, watched)
    (folder / f"{section}.md").write_text(table)
    print(f"\n{table}\n{section}.md and {section}.png lie in {folder}/")


def flags(section: str, args: Report, runs: list[str]) -> str:
    """The words after `python analysis.py SECTION` that ask for this section alone, with the same settings."""
    if section == "dynamics":
        return shlex.join(runs)
    kind = next(kind for kind in (*PARTS, Mechanism) if kind.__name__.lower() == section)
    brought = {"models", "model", *args.TOLD} - {"env"}  # by the runs
    changed = [
        f.name for f in fields(kind) if f.name not in brought and getattr(args, f.name) != getattr(kind(), f.name)
    ]
    words = [word for name in changed for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    return shlex.join(["base", *runs, *words])


def report(args: Report) -> None:
    """Everything on one page."""
    groups, args = groups_of(args)
    if "base" not in groups:
        raise UsageError("a report compares with the base: name it too, for example: base runs/frozenlake/grpo-mix-s0")
    runs = {label: [policy.run for policy in policies] for label, policies in groups.items() if label != "base"}
    curves = {label: read_probes(own) for label, own in runs.items() if all((r / "probe.jsonl").exists() for r in own)}
    folder = args.out / args.name
    if folder.exists() and any(folder.iterdir()) and not (folder / "report.md").exists():
        raise UsageError(f"{folder} holds something else than a report: choose another --name")
    make_folder(folder)
    result, table = evaluate.report(groups, args, folder, standard_pairs(list(groups)))
    found = collect(groups, args, ("quality", "errors", "likelihood"))
    watched = watch(groups, args) if isinstance(args.new_env(), FrozenLake) else {}
    verdicts = findings.table(findings.judge(result, found, curves))
    judged = [finding for label in groups for finding in findings.effects(result, label)]
    effects = (
        ["## The laboratory's three effects", "", findings.table(judged, findings.LABORATORY), ""] if judged else []
    )

    lines = [
        f"# What did RL improve? {args.new_env().name}: {', '.join(groups)}",
        "",
        "```",
        f"python analysis.py {shlex.join(sys.argv[1:])}",
        "```",
        "",
        f"Game options: {' '.join(args.env_args) or 'the defaults'}; T_max {args.new_env().max_turns}; {args.eval_tasks} "
        f"{args.split} tasks; {len(result.bases)} run{'s' * (len(result.bases) > 1)} of each kind; temperature 0.6, "
        "top-p 0.9; all intervals are 95 %, from a bootstrap.",
        "",
        "## The findings of the paper",
        "",
        findings.RULE,
        "",
        verdicts,
        "",
        *effects,
        "## Pass@(K,T)",
        "",
        *(f"![{name}]({name})\n" for name in ("pass_at_k.png", "pass_at_t.png", "surface.png")),
        table,
    ]
    for section, (title, note) in SECTIONS.items():
        shown = draw(section, folder, found, curves, watched)
        if shown is None:
            (folder / f"{section}.png").unlink(missing_ok=True)  # of an earlier report
            missing = "this environment does not know how good an action is"
            if section == "dynamics":
                missing = "no way of training was probed in all its runs (`--probe 5`)"
            if section == "mechanism":
                missing = "it is read off FrozenLake's maps"
            lines += ["", f"## {title}", "", f"Not measured: {missing}."]
        else:
            own = [str(run) for of_label in runs.values() for run in of_label]
            picture = f"![{title}]({section}.png)"
            command = f"    python analysis.py {section} {flags(section, args, own)}"
            lines += ["", f"## {title}", "", picture, "", shown.rstrip(), "", note.format(args=args), "", command]
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
    | Annotated[Mechanism, tyro.conf.subcommand("mechanism")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)

if __name__ == "__main__":
    run_cli(Args, main, __doc__)
