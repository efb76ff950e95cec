"""Two FrozenLakes of ours, not the paper's, in which care costs turns.

On the paper's map nothing that costs turns is worth learning: the shortest path is the best at every budget, so a budget
hardly changes what is right. The paper's code, database and terminal tasks are another world: there a patient agent tests,
looks up and checks, and a hurried one cannot afford to. Each variant adds one action that buys certainty for a turn, in a
game small enough for a CPU:

    frozenlake-brace   moves slip; after `brace` the next one does not        (the setting of bench/laboratory.md)
    frozenlake-fog     cells are hidden; `look` reveals the four around you

What is right then depends on the turns left: with plenty, brace before every move and arrive in twice the turns; with few,
risk the ice.
"""

from abc import abstractmethod
from functools import lru_cache
from random import Random

import numpy as np

from envs import Player, Step, Task
from envs.frozenlake import (
    GAMMA,
    MOVES,
    FrozenLake,
    Rows,
    backward_induction,
    check_option,
    distances_to_goal,
    moves_without_holes,
    simulator_table,
    transitions,
)


class CarefulLake(FrozenLake):
    """What both variants share: the fifth action's place, and the players of the demonstrations.

    Of the players, one is always careful and one never, `aware` of them are careful while there is time, and `strollers` walk
    down and right without looking, where the goal is on gymnasium's own map: the base's weakness, which costs it the tasks
    whose goal lies elsewhere. With `reads_budget=0` the aware ones toss a coin instead of looking at the turn counter: the
    control, in which the base can learn nothing about budgets.
    """

    careful: str  # the action that costs a turn

    def __init__(self, aware: int, strollers: int, reads_budget: int, *lake):
        check_option("aware", aware, 0, 100)
        check_option("strollers", strollers, 0, 100)
        check_option("reads_budget", reads_budget, 0, 1)
        self.aware, self.strollers, self.reads_budget = aware, strollers, reads_budget
        super().__init__(*lake)

    def believed(self) -> Rows:
        """The map as far as the player knows it."""
        return self.rows

    @abstractmethod
    def care_helps(self, move: str) -> bool:
        """Whether the careful action has not been taken yet for this move."""

    @abstractmethod
    def has_time(self, turns_left: int) -> bool:
        """Whether an aware player is careful."""

    def players(self, rng: Random) -> list[Player]:
        """Each walks a shortest path through the map as it knows it, save the strollers, and draws its own rate of slips for
        the episode: a random action, or now and then a word that is no action."""
        slips = rng.uniform(0.05, 0.35)

        def walk() -> str:
            return rng.choice(self._best_moves(distances_to_goal(self.believed())))

        def stroll() -> str:
            return rng.choice(("down", "right"))

        def player(cares, go, turns_left: int) -> str:
            if rng.random() < slips:
                return rng.choice(self.actions if rng.random() < 0.95 else ("jump",))
            move = go()
            return self.careful if cares(turns_left) and self.care_helps(move) else move

        def aware(turns_left: int) -> bool:
            return self.has_time(turns_left) if self.reads_budget else rng.random() < 0.5

        always, never = (lambda _: True), (lambda _: False)
        habits = [
            (always, walk),
            (never, walk),
            *[(aware, walk)] * self.aware,
            *[(never, stroll)] * self.strollers,
        ]
        return [lambda turns_left, habit=habit: player(*habit, turns_left) for habit in habits]


@lru_cache(maxsize=4096)
def optimal_q_braced(rows: Rows, slip: float, horizon: int, gamma: float = GAMMA) -> np.ndarray:
    """Exact values of the four moves and of brace, shape [horizon + 1, 2 * states, 5]. The second half of the states is on
    firm footing: there a move does not slip, and the footing is gone after it."""
    states = len(simulator_table(rows, slip))
    reward, onward = np.zeros((2 * states, 5)), np.zeros((2 * states, 5, 2 * states))
    for firm, (r, p) in enumerate((transitions(rows, slip), transitions(rows, 0.0))):
        here = slice(firm * states, (firm + 1) * states)
        reward[here, :4], onward[here, :4, :states] = r, p
        onward[here, 4, states:] = np.eye(states)
    return backward_induction(reward, onward, horizon, gamma)


class FrozenLakeBrace(CarefulLake):
    """Moves slip sideways with probability `slip`; `brace` uses a turn, and the next move goes where it should. The map is
    visible, so exact action values are known as on the paper's map. `max_detour` is the most moves that holes may add to the
    way: a model of two layers hardly learns to plan detours, and a task that no policy solves says nothing about budgets."""

    name = "FrozenLake-Brace"
    instruction = (
        "Walk over the ice to the goal without stepping into a hole. "
        "In the grid, P is you, G the goal, H a hole and . ice. "
        "A move may slip sideways. The action brace uses a turn, and the next move does not slip."
    )
    careful = "brace"
    actions = (*MOVES, careful)

    def __init__(
        self,
        size: int = 4,
        holes: float = 0.2,
        slip: float = 0.45,
        max_turns: int = 14,
        min_path: int = 3,
        start: str = "random",
        goal: str = "random",
        max_detour: int = 0,
        aware: int = 4,
        strollers: int = 10,
        reads_budget: int = 1,
    ):
        check_option("size", size, 2, 32)
        check_option("max_detour", max_detour, 0, size * size)
        check_option("min_path", min_path, 1, 2 * (size - 1) + max_detour)  # from corner to corner, and around
        self.max_detour = max_detour
        super().__init__(aware, strollers, reads_budget, size, holes, slip, max_turns, min_path, start, goal)

    def _suits(self, rows: Rows) -> bool:
        start = "".join(rows).index("S")
        longest = moves_without_holes(rows, start) + self.max_detour
        return super()._suits(rows) and distances_to_goal(rows)[start] <= longest

    def reset(self, task: Task, seed: int) -> str:
        self.firm = False
        return super().reset(task, seed)

    def step(self, action: str) -> Step:
        action = action.strip().lower()
        if action == self.careful:
            self.firm = True
            self.game.P = simulator_table(self.rows, 0.0)  # where the next move leads
            return Step(self._observe(), 0.0, False, False)
        if action not in MOVES:
            return self._invalid()  # the turn is gone, the footing is not
        self.firm = False
        step = super().step(action)
        self.game.P = simulator_table(self.rows, self.slip)
        return step

    def _observe(self) -> str:
        return f"{super()._observe()}\nYour footing is {'firm' if self.firm else 'loose'}."

    def state(self):
        return self.here, self.firm

    def action_quality(self, action: str, turns_left: int) -> float | None:
        """Exact Q*(state, action) with `turns_left` turns to go, discounted by 0.95 a turn; 0 for an invalid action."""
        action = action.strip().lower()
        if action not in self.actions:
            return 0.0
        q = optimal_q_braced(self.rows, self.slip, max(turns_left, self.max_turns))
        return float(q[turns_left, self.here + self.firm * self.size**2, self.actions.index(action)])

    def care_helps(self, move: str) -> bool:
        return not self.firm

    def has_time(self, turns_left: int) -> bool:
        # More than enough to brace before each move.
        return turns_left > 2 * distances_to_goal(self.rows).get(self.here, 10**6)


class FrozenLakeFog(CarefulLake):
    """Cells never visited are shown as `?`; `look` uses a turn and reveals the four neighbouring cells for good."""

    name = "FrozenLake-Fog"
    instruction = (
        "Walk over the ice to the goal without stepping into a hole. "
        "In the grid, P is you, G the goal, H a hole, . ice and ? a cell you have not seen. "
        "The action look uses a turn and shows the four cells around you for good."
    )
    careful = "look"
    actions = (*MOVES, careful)

    def __init__(
        self,
        size: int = 5,
        holes: float = 0.25,
        slip: float = 0.0,
        max_turns: int = 24,
        min_path: int = 4,
        start: str = "random",
        goal: str = "random",
        aware: int = 2,
        strollers: int = 0,
        reads_budget: int = 1,
    ):
        super().__init__(aware, strollers, reads_budget, size, holes, slip, max_turns, min_path, start, goal)

    def reset(self, task: Task, seed: int) -> str:
        self.revealed: set[int] = {"".join(task.data).index("S"), "".join(task.data).index("G")}
        return super().reset(task, seed)

    def step(self, action: str) -> Step:
        if action.strip().lower() == self.careful:
            self.revealed |= {self._target(move) for move in MOVES}
            return Step(self._observe(), 0.0, False, False)
        return super().step(action)

    def _observe(self) -> str:
        self.revealed.add(self.here)  # the cell one stands on is seen, and stays seen
        return super()._observe()

    def _seen(self, cell: int) -> str:
        return super()._seen(cell) if cell in self.revealed else "?"

    def state(self):
        return self.here, frozenset(self.revealed)

    def action_quality(self, action: str, turns_left: int) -> float | None:
        # Q* on the full map knows what the fog hides and would call every look a wasted turn. The right value is one
        # over beliefs (which holes are where, given what was seen), which is not computed here: there is no exact
        # measure.
        return None

    def believed(self) -> Rows:
        # The unseen is taken for ice.
        cells = "".join(c if i in self.revealed else "F" for i, c in enumerate(self.cells))
        return tuple(cells[r * self.size : (r + 1) * self.size] for r in range(self.size))

    def care_helps(self, move: str) -> bool:
        return self._target(move) not in self.revealed

    def has_time(self, turns_left: int) -> bool:
        return turns_left > 10
