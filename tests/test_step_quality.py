"""Step quality: states rebuilt as they were, pools with equal shares, qualities and intervals by hand."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from chat import Completion, Sampling
from envs import Task, UsageError
from envs.frozenlake import distances_to_goal
from rollout import Episode, State, play, play_from
from step_quality import (
    Matched,
    action_qualities,
    after_error,
    as_seen,
    continuations,
    draw_pool,
    error_states,
    states_of,
)
from warmstart import ModelArgs

CORRIDOR = Task("corridor", "test", ("SFG", "HHH", "FFF"))


def game(history=0, **options) -> ModelArgs:
    """FrozenLake with these options, as the commands pass it on."""
    return ModelArgs(history=history, env_args=tuple(f"{k}={v}" for k, v in options.items()))


slippery = game(3, slip=0.3, max_turns=10)
small = game(size=3, max_turns=6)


class Scripted:
    """An engine that gives fixed answers in turn, instead of sampling them."""

    context = 10**6

    def __init__(self, codec, *answers: str):
        self.codec, self.answers, self.asked = codec, answers, []

    def generate(self, prompts, sampling, seed):
        self.asked += prompts
        self.sampling = sampling
        end = self.codec.tokenizer.eos_token_id
        ids = [(*self.codec.tokenizer.encode(a, add_special_tokens=False), end) for a in self.answers]
        return [Completion(ids[i % len(ids)], (0.0,) * len(ids[i % len(ids)]), True) for i in range(len(prompts))]


@pytest.fixture
def played(engine):
    """Trajectories with slips, with three past turns in the prompt, and so hot that many answers are no action."""
    games = [(task, seed, 10) for seed, task in enumerate(slippery.new_env().tasks("train", 8, 0))]
    return play(engine, slippery.new_env, games, Sampling(temperature=3.0, max_tokens=4), seed=0, history=3)


def test_states_are_rebuilt_with_the_game_the_prompt_and_the_budget_of_the_recorded_turn(engine, played):
    invalid = 0
    for trajectory in played:
        for state, turn in zip(states_of(trajectory, 3), trajectory.turns, strict=True):
            episode = Episode(slippery.new_env(), engine.codec, state, history=3)
            assert episode.prompt().ids == turn.prompt_ids, "history, observation and counters are those of the record"
            assert episode.env.state() == turn.state, "the slips come from the recorded seed"
            assert state.turns_left == turn.turns_left and episode.state() == state
            invalid += not turn.valid
    assert invalid > 5, "answers that were no action must be among the past turns"


def test_play_goes_on_from_a_state_with_the_turns_that_are_left(engine, played):
    state = next(s for t in played for s in states_of(t, 3) if s.turns_left == 4)
    (onward,) = play_from(engine, slippery.new_env, [state], Sampling(max_tokens=8), seed=1, history=3)
    assert [t.turns_left for t in onward.turns] == [4, 3, 2, 1][: len(onward.turns)] and onward.budget == 10
    assert onward.turns[0].prompt_ids == Episode(slippery.new_env(), engine.codec, state, 3).prompt().ids
    with pytest.raises(UsageError, match="at least 1 turn"):
        Episode(slippery.new_env(), engine.codec, State(state.task, 0, 5, spent=5))


def test_a_pool_has_equal_shares_no_state_twice_and_all_depths(engine):
    lake = game(max_turns=16)
    games = [(task, seed, 16) for task in lake.new_env().tasks("train", 10, 0) for seed in range(4)]
    sources = [play(engine, lake.new_env, games, Sampling(max_tokens=8), seed=s) for s in (0, 1)]
    pool = draw_pool(sources, 80, history=0, seed=0)
    assert len(pool) == 80 and len({as_seen(s) for s in pool}) == 80
    own = [{as_seen(s) for t in source for s in states_of(t, 0)} for source in sources]
    assert all(as_seen(s) in own[i % 2] for i, s in enumerate(pool)), "they alternate between the sources"
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
    env, drawn = small.new_env(), lambda: {env.error_action(Random(i)) for i in range(100)}
    env.reset(CORRIDOR, seed=0)
    assert drawn() == {None}, "from the start right is good, left and up bump, down is a hole"
    env.step("right")
    assert drawn() == {None, "left"}, "one step back; the goal, the hole and the edge are no errors"
    assert Counter(env.error_action(Random(i)) for i in range(4000))["left"] == pytest.approx(1000, abs=120)


@pytest.mark.parametrize("slip", [0.0, 0.4])
def test_error_states_come_right_after_an_action_that_lengthened_the_way(engine, slip):
    lake = game(2, max_turns=10, slip=slip)
    games = [(task, seed, 10) for seed, task in enumerate(lake.new_env().tasks("train", 12, 0))]
    sources = [play(engine, lake.new_env, games, Sampling(max_tokens=8), seed=s, history=2) for s in (0, 1)]
    pool = error_states(sources, 40, engine, lake, seed=0)
    assert len(pool) == 40 == len({as_seen(s) for s in pool})
    for state in pool:
        env = lake.new_env()
        env.reset(state.task, state.seed)
        for action in state.actions[:-1]:
            env.step(action)
        before = distances_to_goal(state.task.data)[env.here]
        assert not env.step(state.actions[-1]).done
        assert distances_to_goal(state.task.data)[env.here] == before + 1, (
            "where it slipped to counts, not where it aimed"
        )
        assert state.recent[-1][1] == f"<action>{state.actions[-1]}</action>", "the policies see the error as their own"
        assert 1 <= state.turns_left < 10 and state.observation == env._observe()


def test_error_states_come_from_both_sources_alike(engine):
    # The same trajectories as both sources: what one takes the other cannot have, and still the shares are alike.
    lake = game(max_turns=16)
    games = [(task, seed, 16) for task in lake.new_env().tasks("train", 6, 0) for seed in range(3)]
    source = play(engine, lake.new_env, games, Sampling(max_tokens=8), seed=0)
    pool = error_states([source, source], 30, engine, lake, seed=0)
    assert len(pool) == 30
    spent = [np.mean([s.spent for s in pool[i::2]]) for i in (0, 1)]
    assert abs(spent[0] - spent[1]) < 2
    every = error_states([source, source], 10_000, engine, lake, seed=0)
    assert 30 < len(every) < 1000 and len(every) % 2 == 0, "it ends when no more are found"
    assert error_states([source, []], 60, engine, lake, seed=0) == []


def test_an_error_that_spends_the_last_turn_or_the_context_is_no_state(engine):
    last = State(CORRIDOR, 0, 2, spent=1, actions=("right",), observation="...")
    assert [after_error(last, engine, small, Random(i)) for i in range(50)] == [None] * 50
    earlier = State(CORRIDOR, 0, 3, spent=1, actions=("right",), observation="...")
    found = {after_error(earlier, engine, small, Random(i)) for i in range(50)} - {None}
    assert {(s.actions, s.spent, s.turns_left) for s in found} == {(("right", "left"), 2, 1)}
    engine.context = 20
    assert {after_error(earlier, engine, small, Random(i)) for i in range(50)} == {None}


def test_action_quality_by_hand(engine):
    # Two moves from the goal with 3 turns left: right 0.95, left (a bump) 0.95^2, no action 0. Beside the goal: 1, 0.95 ^ 2.
    states = [
        State(CORRIDOR, 0, 5, spent=2),
        State(CORRIDOR, 0, 5, 2, ("right",), (), small.new_env().reset(CORRIDOR, 0)),
    ]
    scripted = Scripted(
        engine.codec, "<action>right</action>", "<action>left</action>", "right", "<action>jump</action>"
    )
    found = action_qualities(scripted, states, small, group=4, seed=0)
    assert found == pytest.approx([(0.95 + 0.95**2) / 4, (1 + 0.95**2) / 4])
    assert len(scripted.asked) == 8 and len({p.ids for p in scripted.asked}) == 1, (
        "they look the same, and are asked four times each"
    )
    assert (scripted.sampling.temperature, scripted.sampling.top_p) == (0.6, 0.9), "paper A, B.1"


def test_continuations_by_hand(engine):
    # "right" wins from the start with two turns left, not with one.
    states = [State(CORRIDOR, 0, 4, spent=2), State(CORRIDOR, 0, 4, spent=3)]
    scripted = Scripted(engine.codec, "<action>right</action>")
    assert continuations(scripted, states, small, 3, seed=0).tolist() == [1.0, 0.0]
    assert (scripted.sampling.temperature, scripted.sampling.top_p) == (0.6, 0.9)


def test_no_exact_values_no_step_quality(engine):
    fog = ModelArgs(env="frozenlake-fog", env_args=("size=3",))
    scripted = Scripted(engine.codec, "<action>right</action>")
    with pytest.raises(UsageError, match="FrozenLake-Fog has no exact action values"):
        action_qualities(scripted, [State(CORRIDOR, 0, 5)], fog, 1, seed=0)


def matched(difference, depth, task=None) -> Matched:
    d = np.array(difference, dtype=float)
    task = np.arange(len(d)) if task is None else np.array(task)
    return Matched(np.zeros(len(d)), d, np.zeros(len(d), dtype=int), task, np.array(depth), ["base"])


def test_shares_and_intervals_of_matched_states_by_hand():
    m = matched([0.5, 0.0, -0.25, 0.75], [0.0, 0.2, 0.6, 0.9], task=[0, 0, 0, 0])
    assert m.shares() == (0.5, 0.25, 0.25)
    mean, low, high = m.cell(m.difference)
    assert mean == 0.25 and np.isnan([low, high]).all(), "one task: nothing is known of others"
    assert m.cell(m.difference, m.depth >= 0.5)[0] == 0.25
    both = m.join(matched([1.0], [0.0]))
    assert both.run.tolist() == [0, 0, 0, 0, 1] and len(both.bases) == 2 and both.cell(both.difference)[0] == 0.4
    same = matched([0.25] * 12, [0.0] * 12)
    assert same.cell(same.difference) == (0.25, 0.25, 0.25)


def test_late_gain_by_hand_and_its_interval_by_simulation():
    depth = [0.0] * 10 + [0.5] * 10
    assert matched([0.1] * 5 + [0.3] * 5 + [0.7] * 10, depth).late_gain()[0] == pytest.approx(0.5)
    assert np.isnan(matched([0.1, 0.3] * 10, [0.0, 0.4] * 10).late_gain()).all(), "no state in the second half"
    assert np.isnan(matched([0.1] * 20, [0.0] * 19 + [0.9]).late_gain()).all(), "a single late state proves nothing"
    # Differences of 0.1 early and 0.3 late with noise: the truth is 0.2. Unequal halves, one state per task.
    held = []
    for repeat in range(200):
        rng = np.random.default_rng(repeat)
        depth = rng.random(150) ** 2
        _, low, high = matched(np.where(depth < 0.5, 0.1, 0.3) + rng.normal(0, 0.4, 150), depth).late_gain()
        held.append(low <= 0.2 <= high)
    assert 0.91 <= np.mean(held) <= 0.99
