"""Training dynamics: while whole trajectories get better, do single actions? (paper A, 4.2 and E.3)

RL is trained and judged by the reward of whole trajectories, R_multi. Alongside, the quality of single actions is asked
at one fixed pool of states:

    R_single = mean over 512 states of base trajectories, and 8 actions each, of quality(s, a)

Paper A finds R_multi rising while R_single falls under full-budget RL (Figures 8 and 24), and not with BudgetMix. `--probe
5` in any trainer measures both every 5 steps and writes them to the run's probe.jsonl; `python analysis.py dynamics`
draws them.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from comparison import fine, interval, markdown
from envs import UsageError
from evaluate import TEST_SEED, fingerprint
from plots import Cell, curve, panels, save
from rollout import State, TrainedEngine, Trajectory
from runs import append, make_folder, read_config, read_json, write_json
from step_quality import action_qualities, draw_pool, play_held_out
from warmstart import ModelArgs


class Probe:
    """R_single and R_multi of a policy in training, on what every run of the same base and game is asked (4.2, E.3).

    The pool, 512 states of base trajectories on held-out tasks, is made once and kept beside the runs; each checkpoint
    samples 8 actions at each of them (R_single), and plays the tasks with the full budget (R_multi). Nothing of it
    reaches the training: with and without a probe a run is the same run.
    """

    STATES, ACTIONS, TASKS, TIMES = 512, 8, 64, 4  # the first two are paper A's, E.3

    def __init__(self, args: ModelArgs, base: str | Path, engine: TrainedEngine, folder: Path):
        """`engine` samples from the policy to be trained."""
        self.args, self.engine, self.log = args, engine, folder / "probe.jsonl"
        env = args.new_env()
        self.budget = env.max_turns
        self.tasks = env.tasks("val", self.TASKS, TEST_SEED)
        recipe = {f: getattr(args, f) for f in args.TOLD} | {"base": fingerprint(base)}
        recipe |= {f: getattr(self, f) for f in ("STATES", "TASKS", "TIMES")}
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
        self.file = args.out / f"probe-{args.env}-{digest}.json"
        self.pool = self._load() if self.file.exists() else self._make()

    def _play(self) -> list[Trajectory]:
        return play_held_out(self.engine, self.tasks, self.budget, self.TIMES, self.args)

    def _make(self) -> list[State]:
        with self.engine.base():
            pool = draw_pool([self._play()], self.STATES, self.args.history, seed=0)
        make_folder(self.args.out)
        # Without its picture: that is drawn again when the state is rebuilt.
        write_json(self.file, [asdict(replace(state, picture=None)) | {"task": state.task.id} for state in pool])
        return pool

    def _load(self) -> list[State]:
        tasks = {task.id: task for task in self.tasks}
        try:
            pool = [
                replace(
                    State(**stored),
                    task=tasks[stored["task"]],
                    actions=tuple(stored["actions"]),
                    recent=tuple((before, response) for before, response in stored["recent"]),
                )
                for stored in read_json(self.file)
            ]
        except (KeyError, TypeError, ValueError):
            pool = []
        if not pool:
            raise UsageError(f"{self.file} is no pool of states: remove it and run again")
        return pool

    def begin(self, done: int) -> None:
        """Measure the base before the first step. Raises UsageError for a run that began without a probe."""
        begun = self.log.exists() and bool(self.log.read_text())
        if done and not begun:
            raise UsageError(
                f"{self.log.parent} began without --probe: it has no measurement of the base; leave --probe out"
            )
        if not begun:
            self.measure(0)

    def measure(self, step: int) -> dict[str, float]:
        """Append a line to probe.jsonl: the two means, and by task what their intervals need. Returns the means."""
        count = dict.fromkeys((task.id for task in self.tasks), 0)
        single, multi = dict.fromkeys(count, 0.0), dict.fromkeys(count, 0.0)
        qualities = action_qualities(self.engine, self.pool, self.args, self.ACTIONS, seed=step)
        for state, quality in zip(self.pool, qualities, strict=True):
            single[state.task.id] += quality
            count[state.task.id] += 1
        for trajectory in self._play():
            multi[trajectory.task.id] += trajectory.success / self.TIMES
        means = {"r_single": float(qualities.mean()), "r_multi": sum(multi.values()) / len(multi)}
        by_task = {task: {"states": count[task], "single": single[task], "multi": multi[task]} for task in count}
        append(self.log, [{"step": step} | means | {"by_task": by_task}])
        return means


@dataclass
class Curves:
    """Probes of one way of training: steps, and per step [runs, tasks] of success, and of step quality with the number of
    states behind it."""

    steps: list[int]
    multi: np.ndarray  # [steps, runs, tasks]
    single: np.ndarray
    states: np.ndarray  # [runs, tasks]
    bases: list

    def mean(self, name: str, i: int) -> float:
        """At the step of an index."""
        sizes = self.states if name == "single" else np.ones_like(self.states)
        return float((getattr(self, name)[i] * sizes).sum() / sizes.sum())

    def cells(self, name: str, since: int | None = None) -> list[Cell]:
        """(mean, low, high) at each step, or of the change since the step of that index."""
        values = getattr(self, name) - (0 if since is None else getattr(self, name)[since])
        sizes = self.states if name == "single" else None
        return [interval(v, sizes, self.bases, (0, 1) if since is None else (-1, 1)) for v in values]


def read_probes(runs: list[Path]) -> Curves:
    """probe.jsonl of one or several runs. Raises UsageError where one has none, or they were probed at other steps."""
    rows, bases, asked = [], [], []
    for run in runs:
        config = read_config(run)
        bases.append(config["base"])
        if not (run / "probe.jsonl").exists():
            raise UsageError(f"{run} was trained without probes: train it with --probe 5")
        try:
            trained = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            own = [json.loads(line) for line in (run / "probe.jsonl").read_text().splitlines()]
            steps, tasks = [row["step"] for row in own], list(own[0]["by_task"])
            names = ("multi", "single", "states")
            rows.append(np.array([[[row["by_task"][task][n] for task in tasks] for n in names] for row in own], float))
            if trained[-1] == config["steps"] != steps[-1]:
                raise ValueError("the last probe is missing")
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            raise UsageError(f"{run / 'probe.jsonl'} is damaged") from None
        asked.append((steps, tasks))
        if asked[-1] != asked[0] or steps[0] != 0:
            raise UsageError("these runs were probed at other steps or on other tasks: they cannot be averaged")
    multi, single, states = np.stack(rows, axis=1).transpose(2, 0, 1, 3)  # each [steps, runs, tasks]
    return Curves(asked[0][0], multi, single / np.maximum(states, 1), states[0], bases)


def plot_dynamics(path: Path, curves: dict[str, Curves]) -> None:
    figure, ((multi, single),) = panels(1, 2, height=3.0)
    for style, (label, c) in enumerate(curves.items(), 1):
        curve(multi, c.steps, c.cells("multi"), style, label)
        curve(single, c.steps, c.cells("single"), style, label)
    multi.set(title=r"$R_{multi}$: whole trajectories", xlabel="training step", ylabel="held-out tasks solved at T_max")
    single.set(title=r"$R_{single}$: one action at fixed base states", xlabel="training step", ylabel="mean quality")
    multi.legend(loc="lower right")
    one = next(iter(curves.values()))
    note = f"{one.states.shape[1]} held-out tasks x {Probe.TIMES} trajectories; {int(one.states[0].sum())} states x "
    save(
        figure,
        path,
        note + f"{Probe.ACTIONS} actions; {len(one.bases)} seed{'s' * (len(one.bases) > 1)}; bands: 95 % intervals",
    )


def dynamics_table(curves: dict[str, Curves]) -> str:
    rows = {}
    for label, c in curves.items():
        changes = [fine(c.cells(name, since=0)[-1]) for name in ("multi", "single")]
        first, last = ([f"{c.mean(name, i):.3f}" for name in ("multi", "single")] for i in (0, -1))
        rows[label] = [cell for one in zip(first, last, changes, strict=True) for cell in one]
    header = ["R_multi at first", "at last", "change", "R_single at first", "at last", "change"]
    return "\n".join(markdown("held-out tasks", header, rows))
