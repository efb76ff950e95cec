"""The environment against independent computations: brute force, a second breadth-first search, and gymnasium itself."""

from itertools import product
from random import Random

import numpy as np
import pytest

import envs
from envs import Task, UsageError
from envs.frozenlake import GAMMA, MOVES, distances_to_goal, optimal_q, simulator_table, split_of

CORRIDOR = Task("corridor", "test", ("SFG", "HHH", "FFF"))  # two moves to the right, holes below


def lake(**options):
    return envs.make("frozenlake", **options)


def test_tasks_are_the_same_everywhere_solvable_different_and_split_by_their_own_hash():
    tasks = {split: lake().tasks(split, 200, seed=3) for split in envs.SPLITS}
    assert tasks["train"][:2] == lake().tasks("train", 2, seed=3), (
        "the first tasks do not depend on how many are asked for"
    )
    # Written down once: another machine or Python version that draws other maps breaks every stored result.
    assert [t.id for t in tasks["test"][:3]] == GOLDEN_TEST_IDS
    ids = [t.id for split in envs.SPLITS for t in tasks[split]]
    assert len(set(ids)) == 600
    for split, members in tasks.items():
        for task in members:
            assert split_of(task.data) == split == task.split
            assert lake().min_turns(task) >= 2 and hash(task) is not None


def test_splits_stay_disjoint_for_any_seed():
    small = {split: {t.id for seed in range(20) for t in lake(size=3).tasks(split, 30, seed)} for split in envs.SPLITS}
    assert not small["train"] & small["val"] and not small["train"] & small["test"] and not small["val"] & small["test"]


GOLDEN_TEST_IDS = ["1af079c5bf6c", "11355e690133", "82a2c7cb272a"]


def breadth_first(rows) -> int | None:
    """Shortest path by playing the rules, written without looking at the environment's own search."""
    n, cells = len(rows), "".join(rows)
    frontier, seen, moves = {cells.index("S")}, set(), 0
    while frontier:
        if any(cells[c] == "G" for c in frontier):
            return moves
        seen |= frontier
        nearby = set()
        for c in frontier:
            r, k = divmod(c, n)
            for rr, kk in ((r - 1, k), (r + 1, k), (r, k - 1), (r, k + 1)):
                if 0 <= rr < n and 0 <= kk < n and cells[rr * n + kk] != "H":
                    nearby.add(rr * n + kk)
        frontier, moves = nearby - seen, moves + 1
    return None


def test_structural_bound_matches_breadth_first_search():
    for size in (3, 4, 6):
        env = lake(size=size)
        for task in env.tasks("train", 60, seed=1):
            assert env.min_turns(task) == breadth_first(task.data)


def test_no_policy_beats_the_bound_and_an_optimal_one_reaches_it():
    env = lake(size=4, max_turns=32)
    for task in env.tasks("test", 40, seed=0):
        for budget, expected in ((env.min_turns(task), True), (env.min_turns(task) - 1, False)):
            env.reset(task, seed=0)
            success = False
            for turns_left in range(budget, 0, -1):
                q = [env.action_quality(move, turns_left) for move in MOVES]
                result = env.step(MOVES[int(np.argmax(q))])
                success = success or result.success
                if result.done:
                    break
            assert success is expected


def test_q_star_by_hand():
    env = lake(size=3)
    env.reset(CORRIDOR, seed=0)
    # Two moves from the goal: the reward of 1 comes one step later, so Q(right) is gamma with two turns left, 0 with one.
    assert env.action_quality("right", 2) == pytest.approx(0.95)
    assert env.action_quality("right", 1) == 0.0
    assert env.action_quality("down", 9) == 0.0  # a hole
    assert env.action_quality("left", 3) == pytest.approx(0.95**2)  # bumps into the edge: one turn lost
    assert env.action_quality("sideways", 9) == 0.0  # no action at all
    env.step("right")
    assert env.action_quality("right", 1) == pytest.approx(1.0)


def test_q_star_matches_brute_force_over_all_action_sequences():
    def play(table, cells, actions):
        state, value = cells.index("S"), 0.0
        for t, action in enumerate(actions):
            ((_, state, reward, done),) = table[state][action]
            value += GAMMA**t * reward
            if done:
                break
        return value

    rng = Random(0)
    for task in lake(size=3, min_path=1).tasks("train", 200, seed=5):
        horizon = rng.randint(1, 5)
        table, cells = simulator_table(task.data, 0.0), "".join(task.data)
        q = optimal_q(task.data, 0.0, horizon)[horizon, cells.index("S")]
        for first in range(4):
            best = max(play(table, cells, (first, *rest)) for rest in product(range(4), repeat=horizon - 1))
            assert q[first] == pytest.approx(best, abs=1e-12)


def test_q_star_with_slip_by_hand():
    # Corridor, slip 0.4: "right" from the middle cell goes right with 0.6 (the goal), up into the edge with 0.2, down into a
    # hole with 0.2. With one turn left Q is 0.6; with two, staying put leaves 0.6 for the second: 0.6 + 0.95 * 0.2 * 0.6.
    q = optimal_q(CORRIDOR.data, 0.4, 2)
    assert q[1, 1, 2] == pytest.approx(0.6)
    assert q[2, 1, 2] == pytest.approx(0.6 + 0.95 * 0.2 * 0.6)


def test_the_simulator_is_gymnasiums_and_its_randomness_comes_from_the_seed():
    task = lake(size=6, slip=0.5).tasks("train", 1, seed=0)[0]

    def states(seed):
        env = lake(size=6, slip=0.5)
        env.reset(task, seed)
        visited = []
        for _ in range(12):
            visited.append(env.state())
            if env.step("right").done:
                break
        return visited

    assert states(1) == states(1)
    assert len({tuple(states(seed)) for seed in range(20)}) > 1


def test_observation_names_everything_an_agent_needs():
    env = lake(size=3)
    assert env.reset(CORRIDOR, seed=0) == (
        "P . G\nH H H\n. . .\nYou are at row 0, column 0. The goal is at row 0, column 2.\n"
        "left: edge\ndown: hole\nright: ice\nup: edge"
    )
    assert env.step("right").observation.endswith("left: ice\ndown: hole\nright: goal\nup: edge")
    last = env.step(" RIGHT ")
    assert (last.reward, last.done, last.success) == (1.0, True, True)


def test_falling_ends_the_game_without_reward():
    env = lake(size=3)
    env.reset(CORRIDOR, seed=0)
    assert env.step("down") == envs.Step("You fell into a hole.", 0.0, True, False)


@pytest.mark.parametrize(
    "action", ["not up, down", "up down", "upp", "u", "2", "look", "", "left.", "<right>", "right\nright"]
)
def test_a_word_that_is_no_action_changes_nothing_and_is_named(action):
    env = lake(size=3)
    env.reset(CORRIDOR, seed=0)
    result = env.step(action)
    assert not result.valid and not result.done and result.reward == 0.0
    assert result.observation.startswith("Invalid action: it must be one of left, down, right, up.")
    assert env.state() == 0


def test_every_player_sometimes_wins_and_sometimes_does_not():
    for name in ("frozenlake", "frozenlake-brace", "frozenlake-fog"):
        env, rng = envs.make(name), Random(0)
        outcomes: dict[int, list[bool]] = {}
        for seed, task in enumerate(env.tasks("train", 150, seed=0)):
            env.reset(task, seed)
            for which in range(len(env.players(Random(0)))):
                env.reset(task, seed)
                player, won = env.players(rng)[which], False
                for turns_left in range(env.max_turns, 0, -1):
                    result = env.step(player(turns_left))
                    won = won or result.success
                    if result.done:
                        break
                outcomes.setdefault(which, []).append(won)
        for which, won in outcomes.items():
            assert 0.02 < np.mean(won) < 0.98, f"player {which} of {name}"


def test_distances_are_none_for_cells_cut_off():
    assert distances_to_goal(("SHG", "FHF", "FHF")).get(0) is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_turns": 0}, "max_turns must be between 1 and"),
        ({"max_turns": "many"}, "must be of type int"),
        ({"size": 1}, "size must be between 2 and 32"),
        ({"holes": float("nan")}, "holes must be between 0"),
        ({"slip": "-0.1"}, "slip must be between 0"),
        ({"start": "4,0"}, "start must be random or row,column within the map"),
        ({"goal": "corner"}, "goal must be random or row,column within the map"),
        ({"start": "1,1", "goal": "1,1"}, "start and goal must be different cells"),
        ({"depth": 3}, "has no option 'depth': it has size, holes, slip, max_turns, min_path, start, goal"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    with pytest.raises(UsageError, match=message) as error:
        lake(**options)
    assert "\n" not in str(error.value)


def test_start_and_goal_can_be_fixed():
    corners = lake(start="0,0", goal="3,3").tasks("train", 30, 0)
    assert all(t.data[0][0] == "S" and t.data[3][3] == "G" for t in corners) and len({t.data for t in corners}) == 30
    assert all(t.data[2][1] == "G" and "S" in "".join(t.data) for t in lake(goal="2,1").tasks("train", 30, 0))
    assert all(t.data[0][2] == "S" and "G" in "".join(t.data) for t in lake(start="0,2").tasks("train", 30, 0))


def test_wrong_requests_are_refused():
    with pytest.raises(UsageError, match="unknown environment 'frozen': choose one of frozenlake, frozenlake-brace"):
        envs.make("frozen")
    with pytest.raises(UsageError, match="unknown split 'dev'"):
        lake().tasks("dev", 1, 0)
    with pytest.raises(UsageError, match="found only .* of 500 val maps"):
        lake(size=2).tasks("val", 500, 0)
    with pytest.raises(UsageError, match="not of the form name=value"):
        envs.parse_options(("size",))
