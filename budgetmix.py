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
    python budgetmix.py --env frozenlake-brace --compare --preset results     the laboratory: where the paper's effects appear

The training loop is grpo.py's, the measurement evaluate.py's: read those next.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from itertools import count, product, takewhile
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from tqdm import tqdm

import evaluate
import findings
import gigpo
import grpo
import ppo
from envs import UsageError
from evaluate import Policy, compare
from gigpo import Options as GiGPOOptions
from ppo import Options as PPOOptions
from process_rewards import has_oracle
from rollout import run_cli
from runs import make_folder, read_config, run_label


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


REPEAT = 1000  # the seed of a second training on the same base is that of the first plus this
CREDIT = {"grpo": grpo.GroupCredit, "gigpo": gigpo.AnchorCredit, "ppo": ppo.CriticCredit}


@dataclass
class Args(grpo.Args, evaluate.Settings):
    """Train with BudgetMix and evaluate at every budget. Defaults that differ from paper A (A.2) name the paper's value."""

    algo: Literal["grpo", "gigpo", "ppo", "all"] = "grpo"
    """The algorithm that BudgetMix is combined with; "all" with --compare makes the paper's Table 1 and Figure 9."""
    preset: Literal["quick", "results", "paper", "smollm2"] = "quick"
    """Defaults of the other options. quick: one training of each kind in minutes, which shows directions; results: 4 base
    models with 2 trainings each on 200 tasks in about an hour, from which something can be concluded; paper: the settings
    of paper A, for a GPU; smollm2 (--model smollm2 takes it by itself): a proof that a real model goes through it all."""
    compare: bool = False
    """Also train the full-budget arm: the same algorithm, seeds, tasks and settings, with T_max for every group."""
    seeds: tuple[int, ...] = ()
    """Several seeds in place of --seed: each has its own base model (save with --base-seed or --model) and training;
    intervals then cover seeds too."""
    rl_seeds: int = 1
    """Trainings of each arm on each base model, with tasks, budgets, adapter and sampling of their own."""
    PRESETS: ClassVar = {
        "results": {"seeds": (0, 1, 2, 3), "rl_seeds": 2, "steps": 90, "eval_tasks": 200},
        "paper": {  # paper A, A.2, A.3, B.1 and 5.3; what the paper leaves open is the project's own
            "model": "Qwen/Qwen3-8B", "env_args": ("size=8", "max_turns=70"), "lr": 1e-6, "weight_decay": 0.01,
            "kl_coef": 0.001, "group_size": 16, "clip": 0.2, "percents": (25, 50, 75, 100), "n": 128, "surface_n": 32,
            "lora_rank": 32, "lora_alpha": 64, "tasks_per_step": 16, "steps": 200,
        },
        "smollm2": {  # at most 30 turns a step: what two cores can do with a real model in minutes
            "model": "smollm2", "env_args": ("size=3", "max_turns=6"), "steps": 2, "tasks_per_step": 1, "group_size": 5,
            "micro_batch": 8, "eval_tasks": 4, "n": 4, "k": 2, "percents": (50, 100),
        },
    }  # fmt: skip
    gigpo: GiGPOOptions = field(default_factory=GiGPOOptions)
    ppo: PPOOptions = field(default_factory=PPOOptions)


@dataclass(frozen=True)
class Arm:
    """One way to train: an algorithm, a distribution of budgets, and step rewards or none."""

    algo: str
    mix: bool
    process_reward: str = "none"

    @property
    def folder(self) -> str:
        return f"{self.algo}-{'mix' if self.mix else 'full'}" + f"-{self.process_reward}" * (
            self.process_reward != "none"
        )

    @property
    def label(self) -> str:
        budgets = sample_budget if self.mix else grpo.full_budget
        return run_label({"credit": CREDIT[self.algo].__name__, "budgets": budgets.__name__} | vars(self))

    def args(self, args: Args, seed: int, repeat: int = 0) -> grpo.Args:
        """The settings of this arm's training; the `repeat`-th on the base of a seed draws everything else anew. Nothing in
        them depends on `mix`: BudgetMix changes the budgets alone."""
        shared = {f.name: getattr(args, f.name) for f in fields(grpo.Args)}
        if args.model == "embedded" and args.base_seed is None:
            shared["base_seed"] = seed
        shared |= {"seed": seed + REPEAT * repeat, "process_reward": self.process_reward}
        own = {"grpo": {}, "gigpo": vars(args.gigpo), "ppo": vars(args.ppo)}[self.algo]
        return {"grpo": grpo.Args, "gigpo": gigpo.Args, "ppo": ppo.Args}[self.algo](**shared, **own)


def arms_of(args: Args) -> list[Arm]:
    """What is trained, in the order of the paper's Table 1."""
    algos = list(CREDIT) if args.algo == "all" else [args.algo]
    arms = [Arm(a, mix, args.process_reward) for a in algos for mix in ((False, True) if args.compare else (True,))]
    if args.algo == "all" and args.compare:  # Figure 9: what exact and judged step rewards do for full-budget GRPO
        extra = ["oracle"] * has_oracle(args.new_env()) + ["judge"] * bool(args.judge.model)
        arms += [Arm("grpo", False, signal) for signal in extra]
    return arms


def run_names(arms: list[Arm], seeds: tuple[int, ...], repeats: int) -> dict[tuple[int, int, Arm], str]:
    """{(seed, repeat, arm): ARM-sSEED, on the same base also ARM-sSEED-2 and so on}, in the order of training."""
    return {
        (seed, repeat, arm): f"{arm.folder}-s{seed}" + f"-{repeat + 1}" * (repeat > 0)
        for seed, repeat, arm in product(seeds, range(repeats), arms)
    }


def train_all(args: Args, names: dict[tuple[int, int, Arm], str], folder: Path) -> dict[Arm, list[Path]]:
    """Train every arm with every seed into its folder, one after another under one progress bar; with --resume continue
    those that exist and start the others."""
    runs: dict[Arm, list[Path]] = {arm: [] for _, _, arm in names}
    for seed, arm in {seed: arm for seed, _, arm in names}.items():
        arm.args(args, seed).base()  # made now, with a bar of its own
    with tqdm(total=len(names) * args.steps, unit="step") as bar:
        for (seed, repeat, arm), name in names.items():
            run = folder / name
            settings = arm.args(args, seed, repeat)
            settings = replace(settings, resume=args.resume and (run / "config.json").exists())
            budget = sample_budget if arm.mix else grpo.full_budget
            runs[arm].append(grpo.train(settings, run, budget, CREDIT[arm.algo], bar))
    return runs


def new_or_resumed(args: Args, names: Collection[str]) -> Path:
    """The experiment's folder in `out`. An experiment is never overwritten: a second one of the same name gets the next
    number. --resume continues the latest, or with --name exactly the one named; `names` are the runs that it is to hold.

    Raises UsageError when there is nothing to resume, or more than is asked for: the tables would be made anew without it.
    """

    def numbered(i: int) -> Path:
        name = args.name or args.env
        return args.out / (name if i == 1 else f"{name}-{i}")

    used = list(takewhile(Path.exists, map(numbered, count(1))))
    if not args.resume:  # a folder in which nothing was begun is as good as none
        return next(path for path in (*used, numbered(len(used) + 1)) if not path.exists() or not any(path.iterdir()))
    if not used:
        raise UsageError(f"there is no experiment {numbered(1)} to resume")
    folder = used[0 if args.name else -1]
    left_out = sorted({config.parent.name for config in folder.glob("*/config.json")} - set(names))
    if left_out:
        raise UsageError(
            f"{folder} also holds {', '.join(left_out)}: resume it as it was begun (--preset, --seeds, --algo, --compare ..)"
        )
    return folder


def replay(run: Path) -> str:
    """The last turns of the last recorded successful trajectory of a run (else of the last one) as text."""
    records = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    chosen = ([r for r in records if r["success"]] or records)[-1]
    head = f"One trajectory of training step {chosen['step']}: budget {chosen['budget']}, ended by {chosen['stop']}"
    lines = [f"{head}; its last turns:"]
    for turn in chosen["turns"][-6:]:
        lines += ["", f"  {turn['turns_left']} turns left", *("    " + line for line in turn["observation"].splitlines()),
                  f"  agent: {turn['response']}"]  # fmt: skip
    # What a model says may hold control characters, and a terminal obeys them.
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in "\n".join(lines))


def main(args: Args) -> None:
    args.check()
    seeds = args.seeds or (args.seed,)
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds must be different, not {seeds}")
    if args.seed not in (*seeds, Args.seed):
        raise UsageError(f"--seed {args.seed} has no effect beside the seeds {' '.join(map(str, seeds))}: use --seeds")
    if args.rl_seeds < 1:
        raise UsageError(f"rl_seeds must be at least 1, not {args.rl_seeds}")
    arms = arms_of(args)
    names = run_names(arms, seeds, args.rl_seeds)
    for seed, repeat, arm in names:  # all of them, before the first is trained
        CREDIT[arm.algo].check(arm.args(args, seed, repeat))
    if len({seed + REPEAT * repeat for seed, repeat, _ in names}) < len(seeds) * args.rl_seeds:
        raise UsageError(f"seeds that differ by {REPEAT} are used by --rl-seeds: choose others than {seeds}")
    # Made before the base models are: an experiment that is killed meanwhile can be resumed too.
    folder = make_folder(new_or_resumed(replace(args, out=make_folder(args.out)), names.values()))
    runs = train_all(args, names, folder)

    bases = [read_config(run)["base"] for run in runs[arms[0]]]
    groups = {"base": [Policy(base) for base in bases]}
    groups |= {arm.label: [Policy(base, run) for run, base in zip(runs[arm], bases, strict=True)] for arm in arms}
    result = compare(groups, args)

    # What one wants to read off: every arm against the base, BudgetMix against the full budget of the same algorithm,
    # step rewards against none.
    gains = [(arm.label, replace(arm, mix=False).label) for arm in arms if arm.mix and args.compare]
    signals = [(arm.label, "GRPO") for arm in arms if args.algo == "all" and arm.process_reward != "none"]
    pairs = [(arm.label, "base") for arm in arms] + gains + signals
    table = result.table(pairs, gains)
    judged = [finding for _, full in gains for finding in findings.effects(result, full)]
    if judged:
        table += f"\n\n{findings.table(judged, findings.LABORATORY)}\n\n{findings.RULE}"
    (folder / "table.md").write_text(table + "\n")
    result.write_csv(folder / "table.csv", pairs, gains)
    algos = list(dict.fromkeys(arm.algo for arm in arms))
    plain = [arm for arm in arms if arm.process_reward == args.process_reward]
    result.plot(folder / "pass_at_t.png", [["base", *(a.label for a in plain if a.algo == algo)] for algo in algos])
    pictures = "pass_at_t.png"
    if args.algo == "all" and args.compare:
        full = [arm.label for arm in arms if not arm.mix and arm.algo == "grpo"] + ["GiGPO", "PPO"]
        result.plot(folder / "process_signals.png", [["base", *full]])
        pictures += ", process_signals.png (Figure 9)"

    shown = runs[next(arm for arm in arms if arm.mix)][0]
    print(f"\n{replay(shown)}\n\n{table}\n")
    if judged and args.preset == "quick" and len(set(bases)) == 1:
        print(
            "The effects come from one base model and are a direction, no more. On frozenlake-brace this quick preset"
        )
        print(
            "is enough to see E1 and E2; E3 needs --preset results: four base models, two trainings of each kind, and"
        )
        print("90 steps, because BudgetMix learns more slowly than the full budget.\n")
    print(f"everything lies in {folder}/: {pictures}, table.md, table.csv, and a folder per run, for example {shown}/")
    print("read next: grpo.py (the training loop), then evaluate.py (how these numbers were measured)")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
