"""Step quality: is the single next action of a trained policy better than its base's, at the very same states?

A policy can succeed more often because each step is better, or because it wanders less, recovers better and gives up
later. Paper A, 3.3 tells these apart by asking both policies for actions at *matched states*:

    q(s) = 1/G * sum over G actions a_i ~ policy(. | s) of quality(s, a_i)           G = 16; paper A, 3.3 and B.4

where quality is exact, from the environment's `action_quality`: on FrozenLake Q*(s, a) with the turns left. An answer
that is no action has quality 0. Which states? Those a policy visits are its own; so the pool takes equal shares from
base and trained trajectories, each state once, from all depths. What the models see is what was recorded: the same
history, the same remaining budget.

Three questions are asked of such pools: how do all states compare (Figure 4); how do states just after an injected error
(B.5, Figure 5), and who still reaches the goal from there; does the difference change with depth t / T_max (Figure 6).
The fourth is asked during training: R_single, the quality at a fixed pool of base states (4.2, Figure 8), by `Probe`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from random import Random

import numpy as np

from comparison import interval, interval_of
from envs import Env, Task, UsageError
from evaluate import EVAL_SAMPLING, TEST_SEED
from plots import Cell
from process_rewards import has_oracle
from rollout import Codec, Completion, Engine, Episode, Sampling, State, Trajectory, play, play_from
from runs import append, read_config, read_json, write_json
from warmstart import ModelArgs

DEPTH_BINS = 8  # for drawing states: deep ones are rare in short trajectories and would hardly be met


# ---- pools of states ----


def states_of(trajectory: Trajectory, history: int) -> list[State]:
    """The states before each turn of a trajectory. None of them is terminal: at each the game went on."""
    states, actions, texts = [], [], []
    for turn in trajectory.turns:
        recent = tuple(texts[-history:]) if history else ()
        head = trajectory.task, trajectory.seed, trajectory.budget
        states.append(State(*head, len(texts), tuple(actions), recent, turn.observation))
        texts.append((turn.observation, turn.response))
        actions += [turn.action] if turn.action is not None else []
    return states


def across_depths(states: list[State], rng: Random) -> Iterator[State]:
    """All states in a random order that takes from each of DEPTH_BINS bins of depth in turn, while there are any."""
    bins: dict[int, list[State]] = {}
    for state in rng.sample(states, len(states)):
        bins.setdefault(DEPTH_BINS * state.spent // state.budget, []).append(state)
    in_turn = zip_longest(*(bins[b] for b in sorted(bins)))
    return (state for state in chain.from_iterable(in_turn) if state is not None)


def shown(state: State) -> tuple:
    """What a model sees of a state. States that look the same count as one, whatever seed they came from."""
    return state.task, state.budget, state.spent, state.recent, state.observation


def draw_pool(sources: list[list[Trajectory]], size: int, history: int, seed: int) -> list[State]:
    """About `size` states, as many from each source, each only once (paper A, 3.3). The shares stay equal, so the pool is
    smaller where a source has too few states."""
    rng = Random(f"pool {seed}")
    queues = [across_depths([s for t in source for s in states_of(t, history)], rng) for source in sources]
    pool, seen = [], set()
    while len(pool) + len(sources) <= size:
        drawn = []
        for queue in queues:
            new = next((state for state in queue if shown(state) not in seen), None)
            if new is not None:
                seen.add(shown(new))
                drawn.append(new)
        if len(drawn) < len(sources):
            break
        pool += drawn
    return pool


def error_states(
    sources: list[list[Trajectory]], size: int, new_env: Callable[[], Env], codec: Codec, history: int, seed: int
) -> list[State]:
    """States right after an injected error, as many from each source (paper A, B.5).

    At a random state of a random trajectory a random action is played; it is kept if it set the game back (on
    FrozenLake: if the distance to the goal grew) and neither the game nor the budget ended. The policies then see it in
    the history like any action of their own.
    """
    rng = Random(f"errors {seed}")
    pool, seen = [], set()
    for source in sources:
        found: list[State] = []
        for _ in range(50 * size):  # many draws are no errors, or are met twice
            if len(found) == size // len(sources):
                break
            trajectory = rng.choice(source)
            state = after_error(rng.choice(states_of(trajectory, history)), new_env, codec, history, rng)
            if state is not None and shown(state) not in seen:
                seen.add(shown(state))
                found.append(state)
        pool.append(found)
    share = min(map(len, pool))
    return [state for found in pool for state in found[:share]]


def after_error(state: State, new_env: Callable[[], Env], codec: Codec, history: int, rng: Random) -> State | None:
    """The state after one random action that was an error, or None when it was none."""
    episode = Episode(new_env(), codec, state, history)
    action = episode.env.error_action(rng)
    after = None
    if action is not None:
        tokenizer = codec.tokenizer
        ids = (*tokenizer.encode(f"<action>{action}</action>", add_special_tokens=False), tokenizer.eos_token_id)
        episode.act(episode.prompt(), Completion(ids, (0.0,) * len(ids), finished=True))
        after = None if episode.done else episode.state()
    episode.env.close()
    return after


# ---- measuring ----


def action_qualities(
    engine: Engine,
    states: list[State],
    new_env: Callable[[], Env],
    group: int,
    max_tokens: int,
    history: int,
    seed: int,
) -> np.ndarray:
    """Mean quality of `group` actions of a policy at each state: [states] (paper A, B.4).

    Raises UsageError where the environment has no exact measure.
    """
    prompts = []
    for state in states:
        episode = Episode(new_env(), engine.codec, state, history)
        prompts.append(episode.prompt())
        episode.env.close()
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=max_tokens)
    completions = engine.generate([p for p in prompts for _ in range(group)], sampling, seed)
    means = np.zeros(len(states))
    for i, state in enumerate(states):
        answers = [engine.codec.read(c.ids, c.finished)[2] for c in completions[i * group : (i + 1) * group]]
        # Rebuilt once more, so that no two live games are held at a time: one may be a sandbox or a database.
        env = Episode(new_env(), engine.codec, state, history).env
        known = {a: env.action_quality(a, state.turns_left) for a in set(answers) - {None}}
        env.close()
        if None in known.values():
            raise UsageError(f"{env.name} has no exact action values: step quality cannot be measured on it")
        means[i] = sum(known.get(a, 0.0) for a in answers) / group
    return means


def continuations(
    engine: Engine,
    states: list[State],
    new_env: Callable[[], Env],
    times: int,
    max_tokens: int,
    history: int,
    seed: int,
) -> np.ndarray:
    """Share of `times` continuations with the remaining budget that succeed, from each state: [states] (3.3)."""
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=max_tokens)
    played = play_from(engine, new_env, [s for s in states for _ in range(times)], sampling, seed, history)
    return np.array([t.success for t in played]).reshape(len(states), times).mean(axis=1)


def play_held_out(
    engine: Engine,
    new_env: Callable[[], Env],
    tasks: list[Task],
    budget: int,
    times: int,
    max_tokens: int,
    history: int,
) -> list[Trajectory]:
    """`times` complete trajectories of each task, sampled as in every evaluation."""
    games = [(t, Random(f"episode {t.id} {i}").randrange(2**31), budget) for t in tasks for i in range(times)]
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=max_tokens)
    return play(engine, new_env, games, sampling, TEST_SEED, history)


@dataclass
class Matched:
    """Results of a base and of what was trained from it at the same N states: their quality, or success from there. Several
    runs can be in one; `run` and `task` are indices, `depth` is t / T_max, `bases` names the base of each run."""

    base: np.ndarray
    trained: np.ndarray
    run: np.ndarray
    task: np.ndarray
    depth: np.ndarray
    bases: list

    @property
    def difference(self) -> np.ndarray:
        return self.trained - self.base

    def cell(self, values: np.ndarray, where: np.ndarray | slice = slice(None)) -> Cell:
        """(mean, low, high) of per-state values [N], or of those at `where`; whole tasks are resampled, and runs."""
        return interval_of(values[where], self.run[where], self.task[where], self.bases)

    def shares(self) -> tuple[float, float, float]:
        """Shares of states at which the trained policy is better, tied, worse."""
        better, worse = (self.difference > 1e-9).mean(), (self.difference < -1e-9).mean()
        return float(better), float(1 - better - worse), float(worse)

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Which states lie in the first and in the second half of T_max."""
        return self.depth < 0.5, self.depth >= 0.5

    def late_gain(self) -> Cell:
        """How much larger the trained policy's advantage is in the second half than in the first.

        A difference of two means over different states. Its interval is that of its linear part: each state counts with
        its distance from the mean of its half, divided by that half's share of the states.
        """
        first, second = self.halves()
        if not first.any() or not second.any():
            return self.cell(self.difference[:0], slice(0))
        means = self.difference[first].mean(), self.difference[second].mean()
        late, early = (self.difference - means[1]) / second.mean(), (self.difference - means[0]) / first.mean()
        return self.cell(means[1] - means[0] + np.where(second, late, -early))

    def join(self, other: "Matched") -> "Matched":
        """The states of both, those of `other` as further runs."""
        columns = ("base", "trained", "task", "depth")
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in columns}
        run = np.concatenate([self.run, other.run + len(self.bases)])
        return Matched(**both, run=run, bases=self.bases + other.bases)


# ---- during training ----


class Probe:
    """R_single and R_multi of a policy in training, on what every run of the same base and game is asked (4.2, E.3).

    The pool, 512 states of base trajectories on held-out tasks, is made once and kept beside the runs; each checkpoint
    samples 8 actions at each of them (R_single), and plays the tasks with the full budget (R_multi). Nothing of it
    reaches the training: with and without a probe a run is the same run.
    """

    STATES, ACTIONS, TASKS, TIMES = 512, 8, 64, 4  # the first two are paper A's, E.3

    def __init__(self, args: ModelArgs, base: str | Path, engine, folder: Path):
        """`engine` samples from the policy to be trained, a PEFT model: its base is that with the adapter off."""
        self.args, self.engine, self.log = args, engine, folder / "probe.jsonl"
        env = args.new_env()
        if not has_oracle(env):
            raise UsageError(f"{env.name} has no exact action values: leave out --probe")
        self.budget = env.max_turns
        self.tasks = env.tasks("val", self.TASKS, TEST_SEED)
        recipe = {f: getattr(args, f) for f in ("env", "env_args", "history", "max_tokens")} | {"base": str(base)}
        recipe |= {f: getattr(self, f) for f in ("STATES", "TASKS", "TIMES")}
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
        self.file = args.out / f"probe-{args.env}-{digest}.json"
        self.pool = self._load() if self.file.exists() else self._make()

    def _play(self) -> list[Trajectory]:
        args = self.args
        return play_held_out(
            self.engine, args.new_env, self.tasks, self.budget, self.TIMES, args.max_tokens, args.history
        )

    def _make(self) -> list[State]:
        with self.engine.policy.disable_adapter():
            pool = draw_pool([self._play()], self.STATES, self.args.history, seed=0)
        write_json(self.file, [asdict(state) | {"task": state.task.id} for state in pool])
        return pool

    def _load(self) -> list[State]:
        tasks = {task.id: task for task in self.tasks}
        try:
            return [
                replace(
                    State(**stored),
                    task=tasks[stored["task"]],
                    actions=tuple(stored["actions"]),
                    recent=tuple((before, response) for before, response in stored["recent"]),
                )
                for stored in read_json(self.file)
            ]
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{self.file} is no pool of states: remove it and run again") from None

    def measure(self, step: int) -> dict[str, float]:
        """Append a line to probe.jsonl: the two means, and by task what their intervals need. Returns the means."""
        args, count = self.args, dict.fromkeys((task.id for task in self.tasks), 0)
        single, multi = dict.fromkeys(count, 0.0), dict.fromkeys(count, 0.0)
        qualities = action_qualities(
            self.engine, self.pool, args.new_env, self.ACTIONS, args.max_tokens, args.history, seed=step
        )
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

    def cells(self, name: str, since: int | None = None) -> list[Cell]:
        """(mean, low, high) at each step, or of the change since the step of that index."""
        values = getattr(self, name) - (0 if since is None else getattr(self, name)[since])
        sizes = self.states if name == "single" else None
        return [interval(v, sizes, self.bases) for v in values]


def read_probes(runs: list[Path]) -> Curves:
    """probe.jsonl of one or several runs. Raises UsageError where one has none, or they were probed at other steps."""
    rows, bases = [], []
    for run in runs:
        bases.append(read_config(run)["base"])
        if not (run / "probe.jsonl").exists():
            raise UsageError(f"{run} was trained without probes: train it with --probe 5")
        try:
            rows.append([json.loads(line) for line in (run / "probe.jsonl").read_text().splitlines()])
            steps = [[row["step"] for row in own] for own in rows]
            tasks = [list(row["by_task"]) for own in rows for row in own]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{run / 'probe.jsonl'} is damaged") from None
    if any(s != steps[0] for s in steps) or any(t != tasks[0] for t in tasks):
        raise UsageError("these runs were probed at other steps or on other tasks: they cannot be averaged")
    read = lambda name: np.array([[[t[name] for t in row["by_task"].values()] for row in own] for own in rows])  # noqa: E731
    states = read("states")[:, 0]  # [runs, tasks]: the pool is the same at every step
    single = read("single") / np.maximum(states, 1)[:, None]
    return Curves(steps[0], read("multi").swapaxes(0, 1), single.swapaxes(0, 1), states, bases)
