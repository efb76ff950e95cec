"""The contract of an environment: what an agent can play, and what the trainers may ask of it.

An environment is a game over text. It knows nothing of language models, prompts, budgets or rewards shaping: the
rollout (`rollout.py`) counts the turns and tells the model about them; the environment only answers one action with one
observation. Everything below is used by some part of the project, and nothing else is asked for, so a new environment
is this list:

    name, max_turns, instruction, action_format   fill the budget-aware prompt (paper A, Table 2)
    tasks(split, n, seed)                         train, val and test pairwise disjoint, the same on every machine
    reset(task, seed), step(action)               the game; all randomness of an episode comes from `seed`
    state()                                       GiGPO's anchor key
    picture()                                     what a vision model is shown besides the observation
    min_turns(task)                               structural upper bound (paper A, B.3)
    action_quality(action, turns_left)            step quality (paper A, 3.3)
    error_action(rng)                             a random action that sets the game back (paper A, B.5)
    players(rng)                                  scripted imperfect players: they teach the embedded base model
    close()
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from random import Random
from typing import Any

# A scripted player: told how many turns are left (this one included), it answers with the text of one action.
Player = Callable[[int], str]

SPLITS = ("train", "val", "test")


class UsageError(ValueError):
    """Something the user asked for cannot be done. Its message is one line that says what was wrong and what to do
    instead; command lines print that line and exit with code 2 (see `rollout.run_cli`)."""


@dataclass(frozen=True)
class Task:
    """One instance of an environment. Hashable and picklable; every member of a group plays the same one."""

    id: str
    split: str
    data: Hashable


@dataclass(frozen=True)
class Step:
    """What the environment answers to one action. `valid` is False when the action was not one of this environment's:
    such an action costs a turn like any other, and the observation says what was wrong with it."""

    observation: str
    reward: float
    done: bool
    success: bool
    valid: bool = True


class Env(ABC):
    """One live game. `reset` starts an episode, `step` plays it; many instances run side by side, one per trajectory."""

    name: str
    max_turns: int
    instruction: str
    action_format: str

    @abstractmethod
    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """`n` different tasks of a split. No task of one split is in another, whatever `n` and `seed` are.

        Raises UsageError for an unknown split, or where the options do not allow `n` different tasks.
        """

    @abstractmethod
    def reset(self, task: Task, seed: int) -> str:
        """Start an episode and return the first observation."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Play one action, given as the text between <action> and </action>."""

    @abstractmethod
    def state(self) -> Hashable:
        """What decides the future of this episode besides the turns left. Two turns with equal states are GiGPO anchors."""

    def picture(self) -> bytes | None:
        """What the agent sees now as a PNG, where pictures were asked for; None in a game of text."""
        return None

    def min_turns(self, task: Task) -> int | None:
        """Fewest turns in which the task can succeed, or None where that is unknown."""
        return None

    def action_quality(self, action: str, turns_left: int) -> float | None:
        """Quality in [0, 1] of playing `action` now with `turns_left` turns to go (this one included); None where no
        exact measure exists."""
        return None

    def error_action(self, rng: Random) -> str | None:
        """Draw an action at random: returned if playing it now would set the episode back without ending it, so that the
        state after it is an error state (paper A, B.5); None if it would not, or where the environment cannot tell."""
        return None

    def players(self, rng: Random) -> list[Player]:
        """Scripted players of the episode in progress, imperfect on purpose: the base model learns from all of them."""
        return []

    def close(self) -> None:
        """Release what the episode holds (processes, connections)."""
        return None


_REGISTRY = {
    "frozenlake": ("envs.frozenlake", "FrozenLake"),
    "frozenlake-brace": ("envs.frozenlake_variants", "FrozenLakeBrace"),
    "frozenlake-fog": ("envs.frozenlake_variants", "FrozenLakeFog"),
}


def make(name: str, **options: Any) -> Env:
    """Build an environment by name. Option values may be strings (they come from the command line as `size=8`): each is
    converted to the type of the option's default.

    Raises UsageError for an unknown name, an unknown option or a value that does not fit.
    """
    if name not in _REGISTRY:
        raise UsageError(f"unknown environment {name!r}: choose one of {', '.join(sorted(_REGISTRY))}")
    module, class_name = _REGISTRY[name]
    cls = getattr(importlib.import_module(module), class_name)
    defaults = {key: p.default for key, p in inspect.signature(cls).parameters.items()}
    converted = {}
    for key, value in options.items():
        if key not in defaults:
            raise UsageError(f"environment {name!r} has no option {key!r}: it has {', '.join(defaults)}")
        try:
            converted[key] = type(defaults[key])(value)
        except ValueError:
            raise UsageError(
                f"option {key}={value!r} of {name!r} must be of type {type(defaults[key]).__name__}"
            ) from None
    return cls(**converted)


def parse_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """("size=8", "holes=0.2") -> {"size": "8", "holes": "0.2"}, for `make`."""
    broken = [pair for pair in pairs if "=" not in pair]
    if broken:
        raise UsageError(f"environment option {broken[0]!r} is not of the form name=value, for example size=8")
    return dict(pair.split("=", 1) for pair in pairs)
