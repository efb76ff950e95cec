"""Step quality: states rebuilt as they were, pools with equal shares, qualities and intervals by hand, and the probe."""

import json
from collections import Counter
from functools import partial
from random import Random

import numpy as np
import pytest
import torch

import envs
import grpo
import step_quality
from envs import Task, UsageError
from envs.frozenlake import distances_to_goal
from rollout import Completion, Episode, Sampling, State, play, play_from
from step_quality import (
    Matched,
    action_qualities,
    after_error,
    continuations,
    draw_pool,
    error_states,
    read_probes,
    shown,
    states_of,
)

CORRIDOR = Task("corridor", "test", ("SFG", "HHH", "FFF"))
slippery = partial(envs.make, "frozenlake", slip=0.3, max_turns=10)
small = partial(envs.make, "frozenlake", size=3, max_turns=6)


class Scripted:
    """An engine that gives fixed answers in turn, instead of sampling them."""

    context = 10**6

    def __init__(self, codec, *answers: str):
        self.codec, self.answers, self.asked = codec, answers, []

    def generate(self, prompts, sampling, seed):
        self.asked += prompts
        end = self.codec.tokenizer.eos_token_id
        ids = [(*self.codec.tokenizer.encode(a, add_special_tokens=False), end) for a in self.answers]
        return [Completion(ids[i % len(ids)], (0.0,) * len(ids[i % len(ids)]), True) for i in range(len(prompts))]


@pytest.fixture
def played(engine):
    """Trajectories with slips, with three past turns in the prompt, and so hot that many answers are no action."""
    games = [(task, seed, 10) for seed, task in enumerate(slippery().tasks("train", 8, 0))]
    return play(engine, slippery, games, Sampling(temperature=3.0, max_tokens=4), seed=0, history=3)


def test_states_are_rebuilt_with_the_game_the_prompt_and_the_budget_of_the_recorded_turn(engine, played):
    invalid = 0
    for trajectory in played:
        for state, turn in zip(states_of(trajectory, 3), trajectory.turns, strict=True):
            episode = Episode(slippery(), engine.codec, state, history=3)
            assert episode.prompt() == turn.prompt_ids, "history, observation and counters are those of the record"
            assert episode.env.state() == turn.state, "the slips come from the recorded seed"
            assert state.turns_left == turn.turns_left and episode.state() == state
            invalid += not turn.valid
    assert invalid > 5, "answers that were no action must be among the past turns"


def test_play_goes_on_from_a_state_with_the_turns_that_are_left(engine, played):
    state = next(s for t in played for s in states_of(t, 3) if s.turns_left == 4)
    (onward,) = play_from(engine, slippery, [state], Sampling(max_tokens=8), seed=1, history=3)
    assert [t.turns_left for t in onward.turns] == [4, 3, 2, 1][: len(onward.turns)] and onward.budget == 10
    assert onward.turns[0].prompt_ids == Episode(slippery(), engine.codec, state, 3).prompt()
    with pytest.raises(UsageError, match="at least 1 turn"):
        Episode(slippery(), engine.codec, State(state.task, 0, 5, spent=5))


def test_a_pool_has_equal_shares_no_state_twice_and_all_depths(engine):
    lake = partial(envs.make, "frozenlake", max_turns=16)
    games = [(task, seed, 16) for task in lake().tasks("train", 10, 0) for seed in range(4)]
    sources = [play(engine, lake, games, Sampling(max_tokens=8), seed=s) for s in (0, 1)]
    pool = draw_pool(sources, 80, history=0, seed=0)
    assert len(pool) == 80 and len({shown(s) for s in pool}) == 80
    own = [{shown(s) for t in source for s in states_of(t, 0)} for source in sources]
    assert all(shown(s) in own[i % 2] for i, s in enumerate(pool)), "they alternate between the sources"
    depths = Counter(8 * s.spent // 16 for s in pool)
    assert set(depths) == set(range(8)) and max(depths.values()) <= 2 * min(depths.values())
    assert pool == draw_pool(sources, 80, 0, seed=0) != draw_pool(sources, 80, 0, seed=1)
    # One source with two states only: the shares stay equal.
    few = draw_pool([sources[0], [_first_turns(sources[1][0], 2)]], 80, 0, seed=0)
    assert len(few) == 4


def _first_turns(trajectory, n):
    trajectory.turns = trajectory.turns[:n]
    return trajectory


def test_what_an_error_is_by_hand():
    env, drawn = small(), lambda: {env.error_action(Random(i)) for i in range(100)}
    env.reset(CORRIDOR, seed=0)
    assert drawn() == {None}, "from the start right is good, left and up bump, down is a hole"
    env.step("right")
    assert drawn() == {None, "left"}, "one step back; the goal, the hole and the edge are no errors"
    assert Counter(env.error_action(Random(i)) for i in range(4000))["left"] == pytest.approx(1000, abs=120)


def test_error_states_come_right_after_an_action_that_lengthened_the_way(engine, played):
    lake = partial(envs.make, "frozenlake", max_turns=10)
    games = [(task, seed, 10) for seed, task in enumerate(lake().tasks("train", 12, 0))]
    sources = [play(engine, lake, games, Sampling(max_tokens=8), seed=s, history=2) for s in (0, 1)]
    pool = error_states(sources, 40, lake, engine.codec, history=2, seed=0)
    assert len(pool) == 40 == len({shown(s) for s in pool})
    for state in pool:
        env = lake()
        env.reset(state.task, state.seed)
        for action in state.actions[:-1]:
            env.step(action)
        before = distances_to_goal(state.task.data)[env.here]
        assert not env.step(state.actions[-1]).done
        assert distances_to_goal(state.task.data)[env.here] == before + 1
        assert state.recent[-1][1] == f"<action>{state.actions[-1]}</action>", "the policies see the error as their own"
        assert 1 <= state.turns_left < 10 and state.observation == env._observe()


def test_an_error_that_spends_the_last_turn_is_no_state(engine):
    last = State(CORRIDOR, 0, 2, spent=1, actions=("right",), observation="...")
    found = [after_error(last, small, engine.codec, 0, Random(i)) for i in range(50)]
    assert found == [None] * 50
    earlier = State(CORRIDOR, 0, 3, spent=1, actions=("right",), observation="...")
    found = {after_error(earlier, small, engine.codec, 0, Random(i)) for i in range(50)} - {None}
    assert {(s.actions, s.spent, s.turns_left) for s in found} == {(("right", "left"), 2, 1)}


def test_action_quality_by_hand(engine):
    # Two moves from the goal with 3 turns left: right 0.95, left (a bump) 0.95^2, no action 0. Beside the goal: 1, 0.95 ^ 2.
    states = [State(CORRIDOR, 0, 5, spent=2), State(CORRIDOR, 0, 5, 2, ("right",), (), small().reset(CORRIDOR, 0))]
    scripted = Scripted(
        engine.codec, "<action>right</action>", "<action>left</action>", "right", "<action>jump</action>"
    )
    found = action_qualities(scripted, states, small, group=4, max_tokens=8, history=0, seed=0)
    assert found == pytest.approx([(0.95 + 0.95**2) / 4, (1 + 0.95**2) / 4])
    assert len(scripted.asked) == 8 and len(set(scripted.asked)) == 1, (
        "they look the same, and are asked four times each"
    )


def test_continuations_by_hand(engine):
    # "right" wins from the start with two turns left, not with one.
    states = [State(CORRIDOR, 0, 4, spent=2), State(CORRIDOR, 0, 4, spent=3)]
    scripted = Scripted(engine.codec, "<action>right</action>")
    assert continuations(scripted, states, small, 3, 8, 0, seed=0).tolist() == [1.0, 0.0]


def test_no_exact_values_no_step_quality(engine):
    fog = partial(envs.make, "frozenlake-fog", size=3)
    scripted = Scripted(engine.codec, "<action>right</action>")
    with pytest.raises(UsageError, match="FrozenLake-Fog has no exact action values"):
        action_qualities(scripted, [State(CORRIDOR, 0, 5)], fog, 1, 8, 0, seed=0)


def matched(difference, depth, task=None) -> Matched:
    d = np.array(difference, dtype=float)
    task = np.arange(len(d)) if task is None else np.array(task)
    return Matched(np.zeros(len(d)), d, np.zeros(len(d), dtype=int), task, np.array(depth), ["base"])


def test_shares_and_intervals_of_matched_states_by_hand():
    m = matched([0.5, 0.0, -0.25, 0.75], [0.0, 0.2, 0.6, 0.9], task=[0, 0, 0, 0])
    assert m.shares() == (0.5, 0.25, 0.25)
    assert m.cell(m.difference) == (0.25, 0.25, 0.25), "one map only: nothing to resample"
    assert m.cell(m.difference, m.depth >= 0.5) == (0.25, 0.25, 0.25)
    both = m.join(matched([1.0], [0.0]))
    assert both.run.tolist() == [0, 0, 0, 0, 1] and len(both.bases) == 2 and both.cell(both.difference)[0] == 0.4


def test_late_gain_by_hand_and_its_interval_by_simulation():
    assert matched([0.1, 0.3, 0.5, 0.9], [0.0, 0.4, 0.5, 1.0], [0] * 4).late_gain() == pytest.approx((0.5, 0.5, 0.5))
    assert np.isnan(matched([0.1, 0.3], [0.0, 0.4]).late_gain()).all(), "no state in the second half"
    # Differences of 0.1 early and 0.3 late with noise: the truth is 0.2. Unequal halves, one state per map.
    held = []
    for repeat in range(200):
        rng = np.random.default_rng(repeat)
        depth = rng.random(150) ** 2
        _, low, high = matched(np.where(depth < 0.5, 0.1, 0.3) + rng.normal(0, 0.4, 150), depth).late_gain()
        held.append(low <= 0.2 <= high)
    assert 0.91 <= np.mean(held) <= 0.99


# ---- the probe ----


def train(base, folder, **changes):
    settings = {"steps": 4, "tasks_per_step": 2, "group_size": 4, "train_tasks": 20, "lora_rank": 4, "lora_alpha": 8,
                "env_args": ("max_turns=6",), "out": folder.parent}  # fmt: skip
    return grpo.train(grpo.Args(model=str(base), **settings | changes), folder)


def probes_of(run):
    return [json.loads(line) for line in (run / "probe.jsonl").read_text().splitlines()]


def test_a_probe_changes_nothing_in_the_training_and_its_pool_is_shared(base, tmp_path):
    plain, probed = train(base, tmp_path / "plain"), train(base, tmp_path / "probed", probe=2)
    weights = "adapter/adapter_model.safetensors"
    assert (plain / weights).read_bytes() == (probed / weights).read_bytes()
    assert not (plain / "probe.jsonl").exists()
    rows = probes_of(probed)
    assert [row["step"] for row in rows] == [0, 2, 4]
    (pool,) = tmp_path.glob("probe-frozenlake-*.json")
    states, before = json.loads(pool.read_text()), pool.stat().st_mtime_ns
    assert len(states) == sum(t["states"] for t in rows[0]["by_task"].values())
    held_out = {t.id for t in envs.make("frozenlake").tasks("val", 64, 0)}
    assert {s["task"] for s in states} <= held_out and len({s["spent"] for s in states}) == 6
    # The means are what the parts by task say, and a second run asks the very same states.
    for row in rows:
        tasks = row["by_task"].values()
        assert row["r_single"] == pytest.approx(sum(t["single"] for t in tasks) / len(states))
        assert row["r_multi"] == pytest.approx(sum(t["multi"] for t in tasks) / len(tasks))
    other = train(base, tmp_path / "other", probe=2, lr=0.1)
    assert probes_of(other)[0] == rows[0] and probes_of(other)[2] != rows[2], "at step 0 both are the base"
    assert pool.stat().st_mtime_ns == before


def test_a_killed_run_resumes_to_the_same_probes(base, tmp_path, monkeypatch):
    straight = train(base, tmp_path / "straight", probe=2)
    measure = step_quality.Probe.measure

    def die(probe, step):
        result = measure(probe, step)
        if step == 2:  # written, but its step is not saved yet
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(step_quality.Probe, "measure", die)
    with pytest.raises(KeyboardInterrupt):
        train(base, tmp_path / "killed", probe=2)
    monkeypatch.undo()
    train(base, tmp_path / "killed", probe=2, resume=True)
    assert probes_of(tmp_path / "killed") == probes_of(straight)


def test_curves_average_runs_and_their_changes_have_intervals(base, tmp_path):
    runs = [train(base, tmp_path / f"s{s}", probe=2, seed=s, lr=0.05) for s in (0, 1)]
    curves, rows = read_probes(runs), [probes_of(run) for run in runs]
    for name, key in (("multi", "r_multi"), ("single", "r_single")):
        for i, (mean, low, high) in enumerate(curves.cells(name)):
            assert mean == pytest.approx((rows[0][i][key] + rows[1][i][key]) / 2) and low <= mean <= high
        assert curves.cells(name, since=0)[0] == (0.0, 0.0, 0.0)
        change = np.mean([own[2][key] - own[0][key] for own in rows])
        assert curves.cells(name, since=0)[2][0] == pytest.approx(change)
    unprobed = train(base, tmp_path / "unprobed")
    with pytest.raises(UsageError, match="was trained without probes: train it with --probe"):
        read_probes([unprobed])
    with pytest.raises(UsageError, match="other steps"):
        read_probes([runs[0], train(base, tmp_path / "odd", probe=3)])
    (runs[0] / "probe.jsonl").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        read_probes(runs)


def test_probes_need_exact_values_and_a_whole_pool(base, tmp_path):
    with pytest.raises(UsageError, match="leave out --probe"):
        train(base, tmp_path / "run", probe=2, env="frozenlake-fog")
    assert not (tmp_path / "run").exists()
    train(base, tmp_path / "good", probe=4)
    (pool,) = tmp_path.glob("probe-*.json")
    pool.write_text('[{"task": "gone"}]')
    with pytest.raises(UsageError, match="is no pool of states: remove it"):
        train(base, tmp_path / "bad", probe=4)


def test_the_base_of_a_probe_is_the_model_without_the_adapter(policy, base, tmp_path):
    # Resuming a run whose pool is gone: the pool must come from the base, though the policy has moved on.
    from engine import HFEngine

    args = grpo.Args(model=str(base), env_args=("max_turns=6",), out=tmp_path)
    model, tokenizer = policy
    fresh = step_quality.Probe(args, base, HFEngine(model, tokenizer), tmp_path).pool
    for path in tmp_path.glob("probe-*.json"):
        path.unlink()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.5 * ("lora_B" in name))
    assert step_quality.Probe(args, base, HFEngine(model, tokenizer), tmp_path).pool == fresh
