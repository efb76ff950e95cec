"""FrozenLake as a text game: cross the ice to the goal without falling into a hole, within a budget of turns.

The simulator is gymnasium's. Its transition table `P[state][action] = [(probability, next state, reward, done), ...]`
is the single source of truth: the exact action values, the shortest paths and the tests all read it, nobody writes the
rules twice.

    Q*_h(s, a) = sum over s' of P(s' | s, a) * ( r + gamma * (1 - done) * max_a' Q*_{h-1}(s', a') ),     Q*_0 = 0

is the value of action `a` with `h` turns left (paper A, 3.3 and B.4: finite-horizon dynamic programming, gamma 0.95).

Departures from paper A, on purpose: maps default to 4x4 with a random start and goal and T_max 32 (the paper says T_max
70 and gives no map size), so that a CPU learns something in minutes; `--env-args max_turns=70 size=8` plays longer
games. Moves are deterministic as in the paper; `slip` adds gymnasium's slipping as an option. Variants of ours in which care
costs turns are in envs/frozenlake_variants.py.
"""

import hashlib
import os
import re
from collections import deque
from copy import copy, deepcopy
from functools import lru_cache
from io import BytesIO
from random import Random

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from PIL import Image

from envs import SPLITS, Env, Player, Step, Task, UsageError

MOVES = ("left", "down", "right", "up")  # gymnasium's order: the index is its action number
GAMMA = 0.95  # paper A, 3.3
PICTURE_INSTRUCTION = (
    "Walk over the ice to the goal without stepping into a hole. "
    "The picture shows the lake from above: the figure is you, the flag G the goal, S your start, the dark squares are holes."
)
Rows = tuple[str, ...]


@lru_cache(maxsize=4096)
def simulator(rows: Rows, slip: float) -> FrozenLakeEnv:
    """gymnasium's game of a map, given as rows of the letters S, F, H and G. A template: copy it before playing,
    because building the table anew for each of the thousands of episodes of a training step would take as long as the
    model does."""
    return FrozenLakeEnv(desc=list(rows), is_slippery=slip > 0, success_rate=1.0 - slip)


def simulator_table(rows: Rows, slip: float) -> dict:
    """The transition table P of that game."""
    return simulator(rows, slip).P


@lru_cache(maxsize=4096)
def picture_of(rows: Rows, cell: int) -> bytes:
    """gymnasium's own drawing of a map with the player on a cell, as PNG."""
    os.environ |= {"PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_VIDEODRIVER": "dummy"}  # no banner, and no screen is needed
    game = FrozenLakeEnv(desc=list(rows), is_slippery=False, render_mode="rgb_array")
    game.reset(seed=0)
    game.s = cell
    picture = BytesIO()
    Image.fromarray(game.render()).save(picture, "PNG")
    game.close()
    return picture.getvalue()


@lru_cache(maxsize=4096)
def distances_to_goal(rows: Rows) -> dict[int, int]:
    """{state: fewest moves to the goal that avoid the holes}, for the states from which the goal can be reached.

    Breadth-first search backwards from the goal over the deterministic moves of the simulator's table.
    """
    table = simulator_table(rows, 0.0)
    goal = "".join(rows).index("G")
    came_from: dict[int, list[int]] = {}
    for state, actions in table.items():
        for ((_, successor, _, _),) in actions.values():
            came_from.setdefault(successor, []).append(state)
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for state in came_from.get(here, []):
            if state not in distance and "".join(rows)[state] != "H":
                distance[state] = distance[here] + 1
                queue.append(state)
    return distance


def aims_closer(rows: Rows, cell: int, move: str) -> bool:
    """Whether a move, if it does not slip, leads to a cell from which the goal is nearer."""
    ((_, target, _, _),) = simulator_table(rows, 0.0)[cell][MOVES.index(move)]
    distance = distances_to_goal(rows)
    return distance.get(target, 10**6) < distance.get(cell, 10**6)


def moves_without_holes(rows: Rows, cell: int) -> int:
    """Fewest moves from a cell to the goal if there were no holes."""
    n, goal = len(rows), "".join(rows).index("G")
    return abs(cell // n - goal // n) + abs(cell % n - goal % n)


def transitions(rows: Rows, slip: float) -> tuple[np.ndarray, np.ndarray]:
    """The table as arrays: the reward of a move, shape [states, 4], and the probability of arriving in s' with the game
    still on, shape [states, 4, states]."""
    table = simulator_table(rows, slip)
    states = len(table)
    reward, onward = np.zeros((states, 4)), np.zeros((states, 4, states))
    for state, actions in table.items():
        for action, outcomes in actions.items():
            for probability, successor, r, done in outcomes:
                reward[state, action] += probability * r
                onward[state, action, successor] += probability * (not done)
    return reward, onward


def backward_induction(reward: np.ndarray, onward: np.ndarray, horizon: int, gamma: float = GAMMA) -> np.ndarray:
    """Exact optimal action values, shape [horizon + 1, states, actions]; entry h is with h turns left, entry 0 is all
    zero."""
    q = np.zeros((horizon + 1, *reward.shape))
    for h in range(1, horizon + 1):
        q[h] = reward + gamma * onward @ q[h - 1].max(axis=1)
    return q


@lru_cache(maxsize=4096)
def optimal_q(rows: Rows, slip: float, horizon: int, gamma: float = GAMMA) -> np.ndarray:
    """The exact values of the four moves, shape [horizon + 1, states, 4].

    Holes and the goal are absorbing with reward 0 in the table, so their values are 0: the reward of 1 is paid on
    arrival.
    """
    return backward_induction(*transitions(rows, slip), horizon, gamma)


def split_of(rows: Rows) -> str:
    """The split a map belongs to. The map's own hash decides (70 % train, 10 % val, 20 % test), so no seed, size of a
    pool or machine can ever put one map into two splits."""
    bucket = int.from_bytes(hashlib.sha256("\n".join(rows).encode()).digest()[:4], "big") % 10
    return SPLITS[0] if bucket < 7 else SPLITS[1] if bucket < 8 else SPLITS[2]


class FrozenLake(Env):
    """Text FrozenLake. Options: `size` of the square map, `holes` as a share of its cells, `slip` as the probability
    that a move goes sideways, `max_turns` (the paper's T_max), `min_path` as the least number of moves from start to
    goal, `start` and `goal` as "random" or a fixed "row,column", `observation` as "text" or "image"."""

    name = "FrozenLake"
    instruction = (
        "Walk over the ice to the goal without stepping into a hole. "
        "In the grid, P is you, G the goal, H a hole and . ice."
    )
    actions: tuple[str, ...] = MOVES

    def __init__(
        self,
        size: int = 4,
        holes: float = 0.3,
        slip: float = 0.0,
        max_turns: int = 32,
        min_path: int = 2,
        start: str = "random",
        goal: str = "random",
        observation: str = "text",
    ):
        if observation not in ("text", "image"):
            raise UsageError(f"observation must be text or image, not {observation!r}")
        check_option("size", size, 2, 32)
        check_option("holes", holes, 0.0, 0.9)
        check_option("slip", slip, 0.0, 0.9)
        check_option("max_turns", max_turns, 1, 10_000)
        check_option("min_path", min_path, 1, size * size)
        self.size, self.holes, self.slip, self.max_turns, self.min_path = size, holes, slip, max_turns, min_path
        self.observation = observation
        if observation == "image":
            self.instruction = PICTURE_INSTRUCTION
        self.start, self.goal_cell = self._fixed_cell("start", start), self._fixed_cell("goal", goal)
        if self.start is not None and self.start == self.goal_cell:
            raise UsageError(f"start and goal must be different cells, not both {start}")
        self.action_format = f"<action>move</action> where move is one of {', '.join(self.actions)}"

    # ---- tasks ----

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        if split not in SPLITS:
            raise UsageError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        rng = Random(f"frozenlake {self.size} {self.holes} {self.min_path} {split} {seed}")
        found: dict[Rows, Task] = {}
        for _ in range(1000 * n):  # rejection sampling: most draws belong to another split or cannot be solved
            if len(found) == n:
                break
            rows = self._random_map(rng)
            if rows in found or split_of(rows) != split:
                continue
            if self._suits(rows):
                found[rows] = Task(id=hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12], split=split, data=rows)
        if len(found) < n:
            raise UsageError(
                f"found only {len(found)} of {n} {split} maps with size={self.size} holes={self.holes} "
                f"min_path={self.min_path}: ask for fewer, larger or easier maps"
            )
        return list(found.values())

    def _suits(self, rows: Rows) -> bool:
        """Whether a map can be a task: the goal can be reached, and is far enough."""
        return distances_to_goal(rows).get("".join(rows).index("S"), 0) >= self.min_path

    def _fixed_cell(self, option: str, text: str) -> int | None:
        if text == "random":
            return None
        found = re.fullmatch(r"(\d+),(\d+)", text)
        if not found or max(int(found[1]), int(found[2])) >= self.size:
            raise UsageError(f"{option} must be random or row,column within the map, for example 0,0; not {text!r}")
        return int(found[1]) * self.size + int(found[2])

    def _random_map(self, rng: Random) -> Rows:
        cells = ["H" if rng.random() < self.holes else "F" for _ in range(self.size**2)]
        start, goal = rng.sample(range(self.size**2), 2)
        if self.start is not None:
            start, goal = self.start, start if goal == self.start else goal
        if self.goal_cell is not None:
            start, goal = goal if start == self.goal_cell else start, self.goal_cell
        cells[start], cells[goal] = "S", "G"
        return tuple("".join(cells[r * self.size : (r + 1) * self.size]) for r in range(self.size))

    def min_turns(self, task: Task) -> int:
        # With slip a lucky slide can never beat the shortest path: every slide is itself a move to a neighbouring cell.
        return distances_to_goal(task.data)["".join(task.data).index("S")]

    # ---- the game ----

    def reset(self, task: Task, seed: int) -> str:
        self.rows, self.cells = task.data, "".join(task.data)
        self.game = copy(simulator(self.rows, self.slip))
        self.game.reset(seed=seed)
        self.goal = self.cells.index("G")
        return self._observe()

    def step(self, action: str) -> Step:
        action = action.strip().lower()
        if action not in self.actions:
            return self._invalid()
        _, reward, done, _, _ = self.game.step(MOVES.index(action))
        if not done:
            return Step(self._observe(), 0.0, False, False)
        success = reward > 0
        return Step("You reached the goal." if success else "You fell into a hole.", float(reward), True, success)

    @property
    def here(self) -> int:
        """The cell the player stands on: row * size + column."""
        return int(self.game.s)

    def _invalid(self) -> Step:
        # One fixed sentence (not quoting the answer back): the embedded tokenizer holds it as a single token.
        notice = f"Invalid action: it must be one of {', '.join(self.actions)}. The turn is spent.\n"
        return Step(notice + self._observe(), 0.0, False, False, valid=False)

    def _seen(self, cell: int) -> str:
        """The letter under which a cell is shown to the agent."""
        return {"F": ".", "S": ".", "H": "H", "G": "G"}[self.cells[cell]]

    def _observe(self) -> str:
        # Besides the grid the text names coordinates and the four neighbours: a two-layer model cannot learn to find
        # "the cell below P" in a picture made of letters within the two minutes it has.
        if self.observation == "image":
            return "This is the lake now."
        here, n = self.here, self.size
        grid = "\n".join(
            " ".join("P" if r * n + c == here else self._seen(r * n + c) for c in range(n)) for r in range(n)
        )
        where = f"You are at row {here // n}, column {here % n}. The goal is at row {self.goal // n}, column {self.goal % n}."
        around = "\n".join(f"{move}: {self._neighbour(move)}" for move in MOVES)
        return f"{grid}\n{where}\n{around}"

    def _target(self, move: str) -> int:
        """The cell a move leads to when it does not slip; the player's own cell at the edge of the map."""
        ((_, cell, _, _),) = simulator_table(self.rows, 0.0)[self.here][MOVES.index(move)]
        return cell

    def _best_moves(self, distance: dict[int, int]) -> list[str]:
        """The moves aimed at a cell of least distance to the goal, in the order of MOVES."""
        best = min(distance.get(self._target(m), 10**6) for m in MOVES)
        return [m for m in MOVES if distance.get(self._target(m), 10**6) == best]

    def _neighbour(self, move: str) -> str:
        cell = self._target(move)
        return "edge" if cell == self.here else {".": "ice", "H": "hole", "G": "goal", "?": "unknown"}[self._seen(cell)]

    def picture(self) -> bytes | None:
        return picture_of(self.rows, self.here) if self.observation == "image" else None

    def state(self):
        return self.here

    def action_quality(self, action: str, turns_left: int) -> float | None:
        """Exact Q*(state, action) with `turns_left` turns to go, discounted by 0.95 a turn; 0 for an invalid action."""
        action = action.strip().lower()
        if action not in MOVES:
            return 0.0
        horizon = max(turns_left, self.max_turns)  # one table serves every budget of this map
        return float(optimal_q(self.rows, self.slip, horizon)[turns_left, self.here, MOVES.index(action)])

    def error_action(self, rng: Random) -> str | None:
        # Where the move will lead, slip included, a copy of the game tells that draws the same random numbers. From a hole
        # the goal cannot be reached, so it has no distance; neither has a walled-in cell.
        action, distance, trial = rng.choice(MOVES), distances_to_goal(self.rows), copy(self.game)
        trial.np_random = deepcopy(self.game.np_random)
        trial.step(MOVES.index(action))
        return action if distance.get(int(trial.s), -1) > distance.get(self.here, 10**6) else None

    # ---- scripted players: the demonstrations of the embedded base model ----

    def players(self, rng: Random) -> list[Player]:
        """Imperfect players of five habits, so that the base model is a mixture of good and bad ones, as a pretrained
        model is.

        wandering  strolls at random over cells that are not holes: six players of ten, the base's main weakness
        careful    follows a shortest safe path
        rushing    heads straight for the goal, holes or no holes
        dithering  follows a shortest safe path, but often takes its last step back
        aware      strolls while turns are plenty, is careful when they run short: the only one who reads the budget

        Each draws its own rate of slips for the episode: a random action, or now and then a word that is no action.
        """
        slips, last = rng.uniform(0.05, 0.30), None
        safe = distances_to_goal(self.rows)

        def careful() -> str:
            return rng.choice(self._best_moves(safe))

        def rushing() -> str:
            n, here = self.size, self.here
            down, right = self.goal // n - here // n, self.goal % n - here % n
            toward = ["down" if down > 0 else "up"] * (down != 0) + ["right" if right > 0 else "left"] * (right != 0)
            return rng.choice(toward)

        def wandering() -> str:
            return rng.choice([m for m in MOVES if self._target(m) in safe])

        def dithering() -> str:
            back = {"left": "right", "right": "left", "up": "down", "down": "up"}.get(last)
            return back if back and rng.random() < 0.4 and self._target(back) in safe else careful()

        def player(habit, turns_left: int) -> str:
            nonlocal last
            if rng.random() < slips:
                last = rng.choice(self.actions if rng.random() < 0.95 else ("jump",))
            else:
                last = habit(turns_left)
            return last

        def aware(turns_left: int) -> str:
            return wandering() if turns_left > self.max_turns // 3 else careful()

        habits = [lambda _, walk=walk: walk() for walk in (careful, rushing, *[wandering] * 6, dithering)] + [aware]
        return [lambda turns_left, habit=habit: player(habit, turns_left) for habit in habits]


def check_option(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too, which is refused like any value out of range
        raise UsageError(f"{option} must be between {low} and {high}, not {value}")
