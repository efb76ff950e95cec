"""Pass@(K,T): what can a policy do with K attempts of T turns each? (paper A, 2.2)

    Pass@(K, T) = Pr[ at least one of K trajectories of at most T turns succeeds ]

K is breadth, T depth. Pass@K is the curve over K at the full budget, Pass@T the curve over T at one K (B.3). This file
plays and keeps the trajectories; how the numbers and their intervals come out of them is comparison.py. Four things
make the numbers comparable:

- *Fresh rollouts for each T.* The budget stands in the prompt, so cutting a long trajectory short is not the same as
  playing it with fewer turns: the agent might have hurried.
- *Everything is equal but the weights*: the same test tasks, prompts, budgets, number of samples, temperature 0.6, top-p
  0.9 (B.1).
- *Sampled once.* Every trajectory's outcome is a line in `out`/samples/; all K come from the same n lines, asking for a
  larger n samples only what is missing, and a killed evaluation goes on where it was.
- *Paired.* The interval of a difference resamples tasks, base models and trainings, and takes both policies' results on
  the same task together.

The grey line is the structural bound (B.3): the share of tasks that can be solved in T turns at all. No policy can be
above it.

    python evaluate.py base runs/full runs/mix --env frozenlake
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from chat import Sampling
from comparison import Comparison, Pairs, pass_at_k
from comparison import paired_interval as paired_interval  # for those who compare their own results
from engine import open_engine, saved_shapes
from envs import Task, UsageError
from rollout import Engine, Trajectory, play, run_cli
from runs import FREE_ON_RESUME, make_folder, read_config, replace_file, run_label
from warmstart import ModelArgs

PERCENTS = (25, 50, 75, 100)  # paper A, 5.3
EVAL_SAMPLING = {"temperature": 0.6, "top_p": 0.9}  # paper A, B.1
TEST_SEED = 0  # everyone is measured on the same tasks, whatever seed they were trained with


def budgets_of(t_max: int, percents: tuple[int, ...] = PERCENTS) -> list[int]:
    """The budgets at p percent of T_max, rounded up in integers: 70 gives 18, 35, 53, 70."""
    return [-(-p * t_max // 100) for p in percents]


# ---- rollouts ----


@dataclass
class HeldOut(ModelArgs):
    """The tasks on which trained models are looked at."""

    eval_tasks: int = 100
    """Tasks that each policy plays."""
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
    """Trajectories per task at the full budget, of which Pass@K is computed for K up to n."""
    surface_n: int = 0
    """Trajectories per task at each smaller budget; 0: as many as at the full one."""
    k: int = 8
    """The K of Pass@T."""
    percents: tuple[int, ...] = PERCENTS
    """Budgets, in percent of T_max."""

    def __post_init__(self):
        super().__post_init__()
        self.percents = tuple(sorted(self.percents))

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
        pass_at_k(self.n, 0, self.k)  # says what to do when there are fewer samples than k
        if 0 < self.surface_n < self.k:
            raise UsageError(
                f"Pass@{self.k} needs at least {self.k} samples a task at each budget, there are {self.surface_n} at the "
                "smaller ones: sample more (--surface-n), or lower --k"
            )

    def budgets(self) -> list[int]:
        return budgets_of(self.new_env().max_turns, self.percents)

    def samples(self) -> list[int]:
        """How many trajectories per task are played at each budget."""
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

    def engine(self, settings: ModelArgs) -> Engine:
        adapter = self.run / "adapter" if self.run else None
        ranks = [shape[0] for name, shape in saved_shapes(adapter).items() if "lora_A" in name] if adapter else []
        engine = open_engine(settings, self.base, rank=max(ranks, default=1))
        if adapter:
            engine.load_adapter(adapter)
        return engine

    def open_play(self, settings: ModelArgs, how: dict[str, float] = EVAL_SAMPLING) -> "Play":
        engine, sampling = self.engine(settings), Sampling(**how, max_tokens=settings.max_tokens)
        return lambda games, seed: play(
            engine, settings.new_env, games, sampling, seed, settings.history, settings.EPISODE
        )


def fingerprint(base: str | Path) -> str:
    """What a base model is called, and for a folder a hash of what is in it: of each weight file its size and first
    megabyte, so that large models are told apart in no time."""
    weights = sorted(Path(base).glob("*.safetensors"))
    heads = [(file.name, file.stat().st_size, file.open("rb").read(2**20).hex()) for file in weights]
    return f"{base} {hashlib.sha256(json.dumps(heads).encode()).hexdigest()[:12]}" if heads else str(base)


def samples_file(policy: Policy, settings: HeldOut) -> Path:
    """Where the outcomes of a policy are kept. The name holds a hash of all that they depend on: what was measured under
    other conditions, or with weights that were trained further since, is another file."""
    # The weights themselves, not a step number: a log can be ahead of the adapter that was saved.
    weights = policy.run / "adapter" / "adapter_model.safetensors" if policy.run else None
    try:
        adapter = hashlib.sha256(weights.read_bytes()).hexdigest() if weights else None
    except OSError as error:
        raise UsageError(f"no usable adapter in {policy.run}: {error}") from None
    recipe = {"base": fingerprint(policy.base), "adapter": adapter, "sampling": EVAL_SAMPLING}
    recipe |= {f: getattr(settings, f) for f in (*settings.TOLD, "split")}
    if str(policy.base).startswith("openai:"):
        recipe["endpoint"] = settings.endpoint.address
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    return settings.out / "samples" / f"{policy.name}-{settings.split}-{digest}.jsonl"


# Plays games, given as (task, episode seed, budget), with a seed for the sampling.
Play = Callable[[list[tuple[Task, int, int]], int], list[Trajectory]]


def play_and_keep(
    path: Path, settings: HeldOut, columns: list[tuple[int, int]], who: str, open_play: Callable[[], Play]
):
    """Every game of the held-out tasks at each (budget, number of samples) of `columns`: [budgets][tasks][samples], each
    game a dictionary with success, turns, stop, and what else its trajectory counts.

    What is stored in `path` is not sampled again. Games are played in batches of `sample_batch`, and a batch is stored as a
    whole or not at all: an evaluation that was killed and started again plays the very batches, with the very seeds, that
    an uninterrupted one would have played. `open_play` is called when something is missing: loading a model takes long.
    """
    tasks = settings.new_env().tasks(settings.split, settings.eval_tasks, TEST_SEED)
    lines: list[str] = []
    played: dict[tuple[int, str, int], dict] = {}
    try:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            lines.append(line)
            game = json.loads(line)
            played[game["budget"], game["task"], game["sample"]] = game
            _ = game["success"], game["turns"], game["stop"]
    except (ValueError, KeyError, TypeError):  # bad UTF-8 is a ValueError too
        raise UsageError(f"{path}, line {len(lines)}, is damaged: remove the file and run again") from None

    wanted = dict.fromkeys(
        (budget, task, sample)  # task by task: equal prompts meet in a batch, and each is computed once
        for budget, n in columns
        for task in tasks
        for sample in range(n)
    )
    missing = [game for game in wanted if (game[0], game[1].id, game[2]) not in played]
    if missing:
        make_folder(path.parent)
        play_games = open_play()
        batches = [missing[i : i + settings.sample_batch] for i in range(0, len(missing), settings.sample_batch)]
        done = len(wanted) - len(missing)
        with tqdm(desc=f"evaluating {who}", total=len(wanted), initial=done, unit="game") as bar:
            for batch in batches:
                seed = Random(f"samples {batch[0][0]} {batch[0][1].id} {batch[0][2]}").randrange(2**31)
                trajectories = play_games([(task, episode_seed(task, s), budget) for budget, task, s in batch], seed)
                for (budget, task, sample), t in zip(batch, trajectories, strict=True):
                    game = {"success": t.success, "turns": len(t.turns), "stop": t.stop} | t.facts
                    played[budget, task.id, sample] = {"budget": budget, "task": task.id, "sample": sample} | game
                    lines.append(json.dumps(played[budget, task.id, sample]) + "\n")
                replace_file(path, lambda part: part.write_text("".join(lines)))
                bar.update(len(batch))
        if all(game["stop"] == "context" and not game["turns"] for game in played.values()):
            raise UsageError("no prompt fits into the model's context: lower --max-tokens or --history")
    return [[[played[budget, task.id, s] for s in range(n)] for task in tasks] for budget, n in columns]


def measure(policy: Policy, settings: Settings) -> np.ndarray:
    """Successes [tasks, budgets] among the first n trajectories of each task and budget (`Settings.samples`)."""
    columns = list(zip(settings.budgets(), settings.samples(), strict=True))
    path = samples_file(policy, settings)
    games = play_and_keep(path, settings, columns, policy.name, lambda: policy.open_play(settings))
    return np.array([[sum(game["success"] for game in task) for task in column] for column in games]).T


def episode_seed(task: Task, sample: int) -> int:
    """The seed of the environment in the i-th episode of a task: the same for every policy and budget."""
    return Random(f"episode {task.id} {sample}").randrange(2**31)


def structural_bound(settings: Settings) -> list[float]:
    """Share of the tasks that can succeed at all within each budget (paper A, B.3); empty where that is unknown."""
    env = settings.new_env()
    needed = [env.min_turns(task) for task in env.tasks(settings.split, settings.eval_tasks, TEST_SEED)]
    if None in needed:
        return []
    return [sum(m <= b for m in needed) / len(needed) for b in settings.budgets()]


# ---- comparing ----


Groups = dict[str, list[Policy]]  # label -> one policy per run; the same bases in the same order for every label


def compare(groups: Groups, settings: Settings) -> Comparison:
    """Measure policies on the same tasks and budgets."""
    settings.check()
    counts = {label: np.stack([measure(p, settings) for p in policies]) for label, policies in groups.items()}
    bases = [str(policy.base) for policy in next(iter(groups.values()))]
    bound = structural_bound(settings)
    return Comparison(counts, settings.samples(), settings.percents, settings.budgets(), bound, bases, settings.k)


# ---- the command ----


def group_runs(paths: list[Path], label_of: Callable[[dict], str] = run_label) -> dict[str, list[tuple[dict, Path]]]:
    """Run folders -> {label: its (config, folder) in the order of base and seed}.

    Runs that differ in their seed and base alone are repetitions of one experiment and come under one label, the way they
    were trained ("GRPO + BudgetMix", `label_of` a config); when two experiments would have the same label, it is their
    folders' names.
    """
    if len(set(paths)) < len(paths):
        raise UsageError(f"a run is named twice: {' '.join(map(str, paths))}")
    ignored = {"seed", "base_seed", "base", "model"} | FREE_ON_RESUME
    experiments: dict[str, list[tuple[dict, Path]]] = {}
    for path in paths:
        config = read_config(path)
        settings = json.dumps({k: v for k, v in config.items() if k not in ignored - {"steps"}}, sort_keys=True)
        experiments.setdefault(settings, []).append((config, path))
    labels = [label_of(runs[0][0]) for runs in experiments.values()]
    groups = {}
    for label, runs in zip(labels, experiments.values(), strict=True):
        runs.sort(key=lambda run: (run[0]["base"], run[0]["seed"]))
        if len({(config["base"], config["seed"]) for config, _ in runs}) < len(runs):
            raise UsageError(f"{' and '.join(str(p) for _, p in runs)} are the same experiment with the same seed")
        groups[label if labels.count(label) == 1 else " ".join(path.name for _, path in runs)] = runs
    return groups


def read_models(models: tuple[str, ...], args: HeldOut) -> tuple[Groups, HeldOut]:
    """ "base" and run folders -> policies by label, and the arguments with the game that the runs were trained on.

    Raises UsageError for runs that cannot be compared: other games, or ways of training with other seeds.
    """
    args.new_env()  # is there such an environment?
    paths = [Path(model) for model in models if model != "base"]
    configs = [read_config(path) for path in paths]
    for path, config in zip(paths, configs, strict=True):
        if config["model"] == "embedded" and not Path(config["base"]).exists():
            raise UsageError(f"the base model of {path} is gone: {config['base']} (paths are as they were in training)")
        differ = [f for f in args.TOLD if config[f] != configs[0][f]]
        if config["env"] != args.env:
            raise UsageError(f"{path} was trained on {config['env']}, not on {args.env}: say --env {config['env']}")
        if differ:
            raise UsageError(f"{path} was trained with another {differ[0]} than {paths[0]}: compare like with like")
    if not configs:
        return {"base": [Policy(args.base())]}, args
    own = {name: configs[0][name] for name in ("model", *args.TOLD)}
    own["env_args"] = tuple(own["env_args"])
    by_default = HeldOut(model=args.model, thinking=args.thinking)
    untouched = vars(HeldOut()) | {"max_tokens": by_default.max_tokens}
    for name, value in own.items():
        if name != "env" and getattr(args, name) not in (untouched[name], value):
            raise UsageError(f"--{name.replace('_', '-')} is the run's own, {value!r}: leave it out")
    if args.sample_batch == by_default.sample_batch:
        own["sample_batch"] = None  # what suits the run's model
    args = replace(args, **own)

    groups, pairing = {}, None
    for label, runs in group_runs(paths).items():
        now = [(config["base"], config["seed"]) for config, _ in runs]
        if pairing is not None and now != pairing:
            raise UsageError(
                f"every way of training needs the same bases and seeds to be compared: {label} has {len(now)} of them "
                f"({', '.join(f'{Path(b).name} seed {s}' for b, s in now)}), the first has "
                f"{', '.join(f'{Path(b).name} seed {s}' for b, s in pairing)}"
            )
        pairing = now
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
