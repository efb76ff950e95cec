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
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from random import Random

import numpy as np

from chat import Completion, Sampling
from comparison import FEWEST_TASKS, fine, interval_of, markdown
from envs import Task, UsageError
from evaluate import EVAL_SAMPLING, TEST_SEED, episode_seed
from plots import Cell, curve, panels, save
from rollout import Engine, Episode, State, Trajectory, play, play_from
from warmstart import ModelArgs

BETTER, WORSE = "#D55E00", "#009E73"  # as in the paper's scatter plots: red for RL, teal for the base
DEPTH_BINS = 8  # for drawing states: deep ones are rare in short trajectories and would hardly be met


# ---- pools of states ----


def states_of(trajectory: Trajectory, history: int) -> list[State]:
    """The states before each turn of a trajectory. None of them is terminal: at each the game went on."""
    states, actions, texts = [], [], []
    for turn in trajectory.turns:
        recent = tuple(texts[-history:]) if history else ()
        head = trajectory.task, trajectory.seed, trajectory.budget
        states.append(State(*head, len(texts), tuple(actions), recent, turn.observation, turn.picture))
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


def as_seen(state: State) -> tuple:
    """What a model sees of a state. States that look the same count as one, whatever seed they came from."""
    return state.task, state.budget, state.spent, state.recent, state.observation, state.picture


def equal_shares(queues: list[Iterator[State | None]], size: int, tries: int | None = None) -> list[State]:
    """About `size` states, from each queue in turn, each only once. The shares stay equal: it ends when one queue yields
    nothing new any more (or not within `tries`), and the pool is smaller then."""
    pool, seen = [], set()
    while len(pool) + len(queues) <= size:
        drawn = []
        for queue in queues:
            candidates = (state for state in islice(queue, tries) if state is not None)
            new = next((state for state in candidates if as_seen(state) not in seen), None)
            if new is not None:
                seen.add(as_seen(new))
                drawn.append(new)
        if len(drawn) < len(queues):
            break
        pool += drawn
    return pool


def draw_pool(sources: list[list[Trajectory]], size: int, history: int, seed: int) -> list[State]:
    """About `size` states across all depths, as many from each source, each only once (paper A, 3.3)."""
    rng = Random(f"pool {seed}")
    return equal_shares(
        [across_depths([s for t in source for s in states_of(t, history)], rng) for source in sources], size
    )


def error_states(sources: list[list[Trajectory]], size: int, engine: Engine, args: ModelArgs, seed: int) -> list[State]:
    """About `size` states right after an injected error, as many from each source, each only once (paper A, B.5).

    At a random state of a random trajectory a random action is played; it is kept if it set the game back (on
    FrozenLake: if the distance to the goal grew) and neither the game nor the budget nor the context ended. The policies
    then see it in the history like any action of their own.
    """
    rng = Random(f"errors {seed}")

    def attempts(source: list[Trajectory]) -> Iterator[State | None]:
        trajectories = [states_of(t, args.history) for t in source if t.turns]
        while trajectories:
            yield after_error(rng.choice(rng.choice(trajectories)), engine, args, rng)

    # Most attempts are no errors, many are met twice.
    return equal_shares([attempts(source) for source in sources], size, tries=1000)


def after_error(state: State, engine: Engine, args: ModelArgs, rng: Random) -> State | None:
    """The state after one random action that was an error, or None when it was none."""
    episode = Episode(args.new_env(), engine.codec, state, args.history)
    action, after = episode.env.error_action(rng), None
    if action is not None:
        tokenizer = engine.codec.tokenizer
        ids = (*tokenizer.encode(f"<action>{action}</action>", add_special_tokens=False), tokenizer.eos_token_id)
        episode.act(episode.prompt(), Completion(ids, (0.0,) * len(ids), finished=True))
        if not episode.done and len(episode.prompt().ids) + args.max_tokens <= engine.context:
            after = episode.state()
    episode.env.close()
    return after


# ---- measuring ----


def action_qualities(engine: Engine, states: list[State], args: ModelArgs, group: int, seed: int) -> np.ndarray:
    """Mean quality of `group` actions of a policy at each state: [states] (paper A, B.4).

    Raises UsageError where the environment has no exact measure.
    """
    prompts = []
    for state in states:
        episode = Episode(args.new_env(), engine.codec, state, args.history)
        prompts.append(episode.prompt())
        episode.env.close()
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=args.max_tokens)
    completions = engine.generate([p for p in prompts for _ in range(group)], sampling, seed)
    means = np.zeros(len(states))
    for i, state in enumerate(states):
        answers = [engine.codec.read(c).action for c in completions[i * group : (i + 1) * group]]
        # Rebuilt once more, so that no two live games are held at a time: one may be a sandbox or a database.
        env = Episode(args.new_env(), engine.codec, state, args.history).env
        known = {a: env.action_quality(a, state.turns_left) for a in set(answers) - {None}}
        env.close()
        if None in known.values():
            raise UsageError(f"{env.name} has no exact action values: step quality cannot be measured on it")
        means[i] = sum(known.get(a, 0.0) for a in answers) / group
    return means


def continuations(engine: Engine, states: list[State], args: ModelArgs, times: int, seed: int) -> np.ndarray:
    """Share of `times` continuations with the remaining budget that succeed, from each state: [states] (3.3)."""
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=args.max_tokens)
    played = play_from(engine, args.new_env, [s for s in states for _ in range(times)], sampling, seed, args.history)
    return np.array([t.success for t in played]).reshape(len(states), times).mean(axis=1)


def play_held_out(engine: Engine, tasks: list[Task], budget: int, times: int, args: ModelArgs) -> list[Trajectory]:
    """`times` complete trajectories of each task, sampled as in every evaluation."""
    games = [(task, episode_seed(task, i), budget) for task in tasks for i in range(times)]
    sampling = Sampling(**EVAL_SAMPLING, max_tokens=args.max_tokens)
    return play(engine, args.new_env, games, sampling, TEST_SEED, args.history)


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

    def cell(self, values: np.ndarray, where: np.ndarray | slice = slice(None), within=(-np.inf, np.inf)) -> Cell:
        """(mean, low, high) of per-state values [N], or of those at `where`; whole tasks are resampled, and runs."""
        return interval_of(values[where], self.run[where], self.task[where], self.bases, within)

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
        if min(len(set(self.task[half])) for half in (first, second)) < FEWEST_TASKS:
            return self.cell(self.difference, slice(0))  # a thin half would look certain
        means = self.difference[first].mean(), self.difference[second].mean()
        late, early = (self.difference - means[1]) / second.mean(), (self.difference - means[0]) / first.mean()
        return self.cell(means[1] - means[0] + np.where(second, late, -early))

    def join(self, other: "Matched") -> "Matched":
        """The states of both, those of `other` as further runs."""
        columns = ("base", "trained", "task", "depth")
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in columns}
        run = np.concatenate([self.run, other.run + len(self.bases)])
        return Matched(**both, run=run, bases=self.bases + other.bases)


# ---- pictures and tables ----


def plot_scatter(path: Path, results: dict[str, Matched], where: str = "matched states") -> None:
    """Base quality against trained quality, a point per state; above the diagonal the trained policy is better."""
    figure, (axes,) = panels(1, len(results), width=3.5, height=4.3, sharey=True)
    for axis, (label, m) in zip(axes, results.items(), strict=True):
        scatter(axis, m, label, where)
    axes[0].set_ylabel("trained: mean quality of 1 action")
    save(figure, path, "orange: trained better, green: base better, grey: tied")


def scatter(axis, m: Matched, label: str, where: str) -> None:
    better, tied, worse = m.shares()
    colors = np.where(m.difference > 1e-9, BETTER, np.where(m.difference < -1e-9, WORSE, "#999999"))
    axis.plot([0, 1], [0, 1], color="#555555", lw=1, ls="--", zorder=1)
    axis.scatter(m.base, m.trained, c=colors, s=9, alpha=0.45, lw=0)
    axis.set(xlabel="base: mean quality of 1 action", xlim=(-0.03, 1.03), ylim=(-0.03, 1.09))
    axis.set_box_aspect(1)
    axis.set_title(f"{label}\nbetter {better:.0%}, tied {tied:.0%}, worse {worse:.0%}", fontsize=10)
    axis.text(0.03, 0.97, f"{where}, n = {len(m.base)}", fontsize=8, transform=axis.transAxes, va="top")


def plot_errors(path: Path, quality: dict[str, Matched], recovery: dict[str, Matched]) -> None:
    """Right after an error: the quality of the next action (where it is known), and the success that followed."""
    figure, axes = panels(1 + bool(quality), len(recovery), width=3.5, height=3.5)
    for column, (label, m) in enumerate(quality.items()):
        scatter(axes[0, column], m, label, "after an error")
    for axis, (label, m) in zip(axes[-1], recovery.items(), strict=True):
        for x, (values, color) in enumerate(((m.base, WORSE), (m.trained, BETTER))):
            mean, low, high = m.cell(100 * values, within=(0, 100))
            axis.bar(x, mean, width=0.6, color=color, alpha=0.6)
            axis.errorbar(x, mean, [[mean - low], [high - mean]], color="black", capsize=6)
        axis.set(xticks=[0, 1], xticklabels=["base", "trained"], ylim=(0, 100), title=f"{label}: success from there")
        axis.set_xlabel(f"from {len(m.base)} error states")
    if quality:
        axes[0, 0].set_ylabel("trained: mean quality of 1 action")
    axes[-1, 0].set_ylabel("goal reached, %")
    save(
        figure,
        path,
        "orange: trained (better), green: base (better), grey: tied; bars: 95 % intervals where there are 10 tasks",
    )


def quality_table(results: dict[str, Matched], what: str = "matched states") -> str:
    rows = {}
    for label, m in results.items():
        better, tied, worse = m.shares()
        means = [f"{values.mean():.3f}" for values in (m.base, m.trained)]
        rows[label] = [
            str(len(m.base)),
            *means,
            fine(m.cell(m.difference)),
            *(f"{x:.1%}" for x in (better, tied, worse)),
        ]
    header = ["states", "base", "trained", "trained - base", "better", "tied", "worse"]
    return "\n".join(markdown(what, header, rows))


def depth_bins(m: Matched, bins: int = 8) -> list[tuple[float, np.ndarray]]:
    """(centre, which states) of the bins of t / T_max that hold states of FEWEST_TASKS tasks."""
    index = np.minimum((m.depth * bins).astype(int), bins - 1)
    return [((b + 0.5) / bins, index == b) for b in range(bins) if len(set(m.task[index == b])) >= FEWEST_TASKS]


def plot_depth(path: Path, results: dict[str, Matched]) -> None:
    """Quality of base and trained actions against depth, and their difference below."""
    figure, axes = panels(2, len(results), width=3.4, height=2.2, sharex=True, sharey="row")
    for column, (label, m) in enumerate(results.items()):
        bins = depth_bins(m)
        x = [centre for centre, _ in bins]
        for style, (name, values) in enumerate({"base": m.base, "trained": m.trained}.items()):
            curve(axes[0, column], x, [m.cell(values, where, (0, 1)) for _, where in bins], style, name)
        curve(axes[1, column], x, [m.cell(m.difference, where) for _, where in bins], 2, "trained - base")
        axes[1, column].axhline(0, color="#555555", lw=1)
        if not bins:
            axes[0, column].text(0.1, 0.5, f"no bin with {FEWEST_TASKS} tasks")
        axes[0, column].set(title=f"{label}, {len(m.base)} states", xlim=(0, 1), ylim=(0, 1))
        axes[1, column].set_xlabel(r"depth $t\,/\,T_{max}$")
    axes[0, 0].set_ylabel("mean quality of 1 action")
    axes[1, 0].set_ylabel("difference")
    if axes[0, -1].lines:
        axes[0, -1].legend(loc="lower left")
    save(figure, path, "bands: 95 % intervals over tasks (and runs)")


def depth_table(results: dict[str, Matched]) -> str:
    rows = {label: [fine(m.cell(m.difference, half)) for half in m.halves()] + [fine(m.late_gain())]
            for label, m in results.items()}  # fmt: skip
    header = ["first half (t < T_max / 2)", "second half", "second - first"]
    return "\n".join(markdown("trained - base", header, rows))
