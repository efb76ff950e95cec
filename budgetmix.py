"""BudgetMix: sample the turn budget per task group, and the agent becomes good at every budget. This is the main job.

Standard multi-turn RL plays every training trajectory with the full budget T_max. It never distinguishes a solution in
three turns from one in thirty, so nothing teaches the agent to be quick when it has to be. BudgetMix (paper A, 5.2 and
A.4) changes one line:

    B(x) = Unique({ ceil(k/10 * T_max(x)) : k = 1..10 }),        B ~ Uniform(B(x)) once per task group

All G trajectories of a group play with that B; the prompt says so; running out of turns earns zero. Rewards, losses,
tasks and seeds stay what they were. The group is compared at equal budgets, so a tight budget is not mistaken for a bad
policy.

    python budgetmix.py --env frozenlake               make a base model, train, evaluate at 25 to 100 % of T_max
    python budgetmix.py --env frozenlake --compare     the same, against full-budget training

The training loop is grpo.py's, the measurement evaluate.py's: read those next.
"""

import json
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

import evaluate
import grpo
from envs import UsageError
from evaluate import Policy, compare, read_config
from rollout import make_folder, run_cli


def candidate_budgets(t_max: int) -> list[int]:
    """Paper A, equation 2: the budgets at 10 % intervals of T_max, without repeats: 70 gives 7, 14, .. 70; 3 gives 1,
    2, 3.

    Integer arithmetic throughout: ceil(0.1 * k * t_max) in floats is wrong, 0.1 * 3 * 10 is 3.0000000000000004 and
    rounds to 4. Raises UsageError for t_max < 1.
    """
    if t_max < 1:
        raise UsageError(f"T_max must be at least 1 turn, not {t_max}")
    return sorted({-(-k * t_max // 10) for k in range(1, 11)})


def sample_budget(t_max: int, rng: Random) -> int:
    """One budget for one task group. The distribution stays fixed throughout training (paper A, A.4)."""
    return rng.choice(candidate_budgets(t_max))


@dataclass
class Args(grpo.Args, evaluate.Settings):
    """Train with BudgetMix and evaluate at every budget. Defaults that differ from paper A (A.2) name the paper's value."""

    compare: bool = False
    """Also train the full-budget arm: the same algorithm, seeds, tasks and settings, with T_max for every group."""
    seeds: tuple[int, ...] = ()
    """Several seeds instead of one: each has its own base model and training; intervals then cover seeds too."""


ARMS = {"full": (grpo.full_budget, "GRPO, full budget"), "mix": (sample_budget, "BudgetMix-GRPO")}


def train_arm(args: Args, folder: Path, arm: str, seed: int) -> Path:
    """Train one arm with one seed into `folder`/ARM-sSEED, or see that it is there already (with --resume)."""
    own = {f: getattr(args, f) for f in grpo.Args.__dataclass_fields__}
    run = folder / f"{arm}-s{seed}"
    # A resumed experiment may stop between two arms: continue the ones that exist and start the others.
    run_args = replace(grpo.Args(**own), seed=seed, resume=args.resume and (run / "config.json").exists())
    return grpo.train(run_args, run, ARMS[arm][0])


def new_or_resumed(args: Args) -> Path:
    """The experiment's folder in `out`. An experiment is never overwritten: a second one of the same name gets the next
    number. --resume continues the latest, or with --name exactly the one named."""

    def numbered(i: int) -> Path:
        name = args.name or args.env
        return args.out / (name if i == 1 else f"{name}-{i}")

    free = next(i for i in count(1) if not numbered(i).exists())
    if not args.resume:
        return numbered(free)
    if free == 1:
        raise UsageError(f"there is no experiment {numbered(1)} to resume")
    return numbered(1 if args.name else free - 1)


def replay(run: Path) -> str:
    """The last recorded successful trajectory of a run (else the last one) as text."""
    records = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    chosen = ([r for r in records if r["success"]] or records)[-1]
    lines = [f"One trajectory of training step {chosen['step']}: budget {chosen['budget']}, ended by {chosen['stop']}"]
    for turn in chosen["turns"][-6:]:
        lines += ["", f"  {turn['turns_left']} turns left", *("    " + line for line in turn["observation"].splitlines()),
                  f"  agent: {turn['response']}"]  # fmt: skip
    return "\n".join(lines)


def main(args: Args) -> None:
    grpo.check(args)
    evaluate.check(args)
    seeds = args.seeds or (args.seed,)
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds must be different, not {seeds}")
    args.new_env()  # a wrong environment is refused before a folder is made
    make_folder(args.out)
    folder = new_or_resumed(args)
    arms = ["full", "mix"] if args.compare else ["mix"]
    runs = {arm: [train_arm(args, folder, arm, seed) for seed in seeds] for arm in arms}
    bases = [read_config(run)["base"] for run in runs["mix"]]
    groups = {"base": [Policy(f"base, seed {s}", b, folder / f"base-s{s}") for s, b in zip(seeds, bases, strict=True)]}
    for arm in arms:
        groups[ARMS[arm][1]] = [Policy(run.name, b, run, run) for run, b in zip(runs[arm], bases, strict=True)]
    result = compare(groups, args, folder)
    print(f"\n{replay(runs['mix'][0])}\n\n{result.table()}\n")
    print(
        f"picture  {folder / 'pass_at_t.png'}\ntable    {folder / 'table.md'}\nruns     {', '.join(map(str, runs['mix']))}"
    )
    print("read next: grpo.py (the training loop), then evaluate.py (how these numbers were measured)")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
