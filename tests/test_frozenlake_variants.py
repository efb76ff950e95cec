"""The variants in which care costs turns: their rules and exact values by hand, and who of their players is careful when."""

from itertools import product
from random import Random

import pytest

import envs
from envs import Task, UsageError
from envs.frozenlake import MOVES, simulator_table
from envs.frozenlake_variants import optimal_q_braced

CORRIDOR = Task("corridor", "test", ("SFG", "HHH", "FFF"))  # two moves to the right, holes below


def brace(**options):
    env = envs.make("frozenlake-brace", size=3, min_path=2, slip=0.4, **options)
    env.reset(CORRIDOR, seed=0)
    return env


def test_after_brace_the_next_move_does_not_slip_and_the_one_after_it_may():
    ends = []
    for seed in range(200):
        env = envs.make("frozenlake-brace", size=3, min_path=2, slip=0.4)
        first = env.reset(CORRIDOR, seed)
        assert first.endswith("Your footing is loose.")
        assert env.step("brace").observation.endswith("Your footing is firm.") and env.state() == (0, True)
        assert env.step("right").observation.endswith("Your footing is loose.") and env.state() == (1, False)
        ends.append(env.step("right").success)
    # To the right with 0.6, into the hole below with 0.2, against the edge with 0.2: four standard deviations are 0.14.
    assert 0.46 < sum(ends) / 200 < 0.74


def test_brace_costs_a_turn_and_an_invalid_answer_does_not_cost_the_footing():
    env = brace()
    assert env.step("Brace ") == env.step("brace"), "twice is no better than once"
    told = env.step("jump")
    assert not told.valid and told.observation.startswith(
        "Invalid action: it must be one of left, down, right, up, brace."
    )
    assert env.state() == (0, True) and told.observation.endswith("Your footing is firm.")
    assert env.step("right").done is False and env.step("brace").reward == 0.0 and env.step("right").success


def test_exact_values_with_brace_by_hand():
    env = brace(max_turns=4)
    assert env.action_quality("right", 1) == 0 and env.action_quality("brace", 1) == 0
    # From the middle: loose, right arrives with 0.6 (0.2 hole, 0.2 stays); firm, it arrives.
    q = optimal_q_braced(CORRIDOR.data, 0.4, 4)
    loose, firm, right, up = 1, 1 + 9, MOVES.index("right"), MOVES.index("up")
    assert q[1, loose, right] == pytest.approx(0.6) and q[1, firm, right] == pytest.approx(1.0)
    # With two turns: brace and go is 0.95; go at once 0.6 + 0.95 * 0.2 * 0.6 = 0.714. So brace, but only with two left.
    assert q[2, loose, 4] == pytest.approx(0.95) and q[2, loose, right] == pytest.approx(0.714)
    assert q[1, loose, 4] == 0
    # Up from there stays at the edge with 0.6, slips left or right with 0.2 each, and right is the goal.
    assert q[1, loose, up] == pytest.approx(0.2) and q[1, firm, up] == 0
    # The start, four turns: brace, right, brace, right is 0.95 ** 3 at the end of four.
    assert env.action_quality("brace", 4) == pytest.approx(0.95**3)
    env.step("brace")
    assert env.action_quality("right", 3) == pytest.approx(0.95**2)
    assert env.action_quality("jump", 3) == 0.0


def test_exact_values_with_brace_against_a_second_computation():
    """Undiscounted, the value is the chance of arriving under the best plan: recursion over the simulator's tables."""

    def best(cell, firm, left) -> float:
        if left == 0:
            return 0.0
        values = [best(cell, True, left - 1)]
        for move in range(4):
            outcomes = simulator_table(CORRIDOR.data, 0.0 if firm else 0.4)[cell][move]
            values.append(sum(p * (r if done else best(to, False, left - 1)) for p, to, r, done in outcomes))
        return max(values)

    q = optimal_q_braced(CORRIDOR.data, 0.4, 4, gamma=1.0)
    for left, (cell, firm) in product((1, 2, 3, 4), ((0, False), (0, True), (1, False), (1, True))):
        assert q[left, cell + 9 * firm].max() == pytest.approx(best(cell, firm, left))


def test_an_error_in_the_variant_depends_on_the_footing():
    # Firm in the middle, `left` leads away for certain: an error. The others stay, win or fall: none of them is one.
    env = brace()
    env.step("brace"), env.step("right"), env.step("brace")
    assert {env.error_action(Random(i)) for i in range(60)} == {None, "left"}
    assert env.state() == (1, True)


FREE = Task("free", "test", ("SFFG", "FFFF", "FFFF", "FFFF"))


def cautious(env, which: int, turns_left: int) -> float:
    """How often a player is careful at the start of an open map."""
    env.reset(FREE, seed=0)
    answers = [env.players(Random(i))[which](turns_left) for i in range(400)]
    return sum(answer == env.careful for answer in answers) / 400


def test_who_is_careful_when():
    for name, plenty, few in (("frozenlake-brace", 7, 6), ("frozenlake-fog", 11, 10)):
        env = envs.make(name, size=4, min_path=3, aware=1, strollers=1)
        careful, rushing, aware, stroller = ([cautious(env, who, left) for left in (plenty, few)] for who in range(4))
        # Slips, 5 to 35 % of the turns, are a random one of five actions.
        walked = [env.players(Random(i))[3](plenty) for i in range(200)]
        assert sum(move in ("down", "right") for move in walked) > 150, "a stroller heads away from this goal as often"
        assert min(careful) > 0.7 and max(rushing) < 0.1 and max(stroller) < 0.1
        assert aware[0] > 0.7 and aware[1] < 0.1, "three moves to go: six turns are not more than enough to brace"


def test_in_the_control_nobody_reads_the_budget():
    for name in ("frozenlake-brace", "frozenlake-fog"):
        env = envs.make(name, size=4, min_path=3, aware=2, strollers=2, reads_budget=0)
        env.reset(FREE, seed=0)
        assert len(env.players(Random(0))) == 6
        for which, left in product(range(6), (1, 3, 14)):
            assert [env.players(Random(i))[which](left) for i in range(50)] == [
                env.players(Random(i))[which](24) for i in range(50)
            ]
        assert 0.3 < cautious(env, 2, 1) < 0.7 and 0.3 < cautious(env, 2, 24) < 0.7, "a coin instead"


def test_holes_force_no_detour_unless_allowed():
    def detours(**options) -> set[int]:
        env = envs.make("frozenlake-brace", **options)
        found = set()
        for task in env.tasks("val", 60, 0):
            rows = "".join(task.data)
            (a, b), (c, d) = divmod(rows.index("S"), 4), divmod(rows.index("G"), 4)
            found.add(env.min_turns(task) - abs(a - c) - abs(b - d))
        return found

    # A way around is longer by an even number of moves.
    assert detours() == {0} and detours(max_detour=2) == {0, 2} and max(detours(max_detour=16)) > 2


def test_maps_that_cannot_be_are_refused_by_the_option_that_forbids_them():
    with pytest.raises(UsageError, match="min_path must be between 1 and 6, not 7"):
        envs.make("frozenlake-brace", min_path=7)
    assert envs.make("frozenlake-brace", min_path=7, max_detour=2).min_path == 7


@pytest.mark.parametrize(
    "option, value",
    [("aware", -1), ("strollers", -1), ("reads_budget", 2), ("max_detour", -1), ("slip", 0.95), ("aware", "x")],
)
def test_wrong_options_of_a_variant_are_refused(option, value):
    with pytest.raises(UsageError, match=f"(option )?{option}"):
        envs.make("frozenlake-brace", **{option: value})


def test_fog_hides_until_looked_at_and_the_anchor_says_what_was_seen():
    env = envs.make("frozenlake-fog", size=3, min_path=2)
    first = env.reset(CORRIDOR, seed=0)
    assert first.startswith("P ? G\n? ? ?\n? ? ?\n") and "right: unknown" in first and "left: edge" in first
    before = env.state()
    result = env.step("look")
    assert result.observation.startswith("P . G\nH ? ?\n? ? ?\n") and not result.done
    assert env.state() != before and env.state()[0] == before[0], "the same cell, but another anchor: more is known"
    assert env.action_quality("look", 5) is None and env.action_quality("right", 5) is None
    # What was seen stays seen, also after walking on and back.
    env.step("right")
    assert env.step("left").observation.startswith("P . G\nH ? ?\n")
