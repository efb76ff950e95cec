"""Facts about the laboratory's game that need no training: how much room a budget leaves, and how its players behave.

    python bench/laboratory.py                                   # room, and care of the players with and without the counter
    python bench/laboratory.py runs/base-frozenlake-brace-s0-*   # and how well a base model knows the way

Room: the share of tasks that arrive within T turns under the best policy, the best that never braces, and one that braces
before every move, by exact dynamic programming (gamma 1) over training maps.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import envs  # noqa: E402
from chat import Sampling  # noqa: E402
from engine import HFEngine, load_model  # noqa: E402
from envs.frozenlake import (  # noqa: E402
    MOVES,
    aims_closer,
    distances_to_goal,
    moves_without_holes,
    optimal_q,
    transitions,
)
from envs.frozenlake_variants import optimal_q_braced  # noqa: E402
from evaluate import EVAL_SAMPLING, budgets_of  # noqa: E402
from rollout import render_prompt, run_cli  # noqa: E402


@dataclass
class Args:
    """Facts about frozenlake-brace."""

    bases: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Folders of embedded base models of frozenlake-brace."""
    tasks: int = 200
    """Training maps."""


def always_braced(rows, horizon: int) -> np.ndarray:
    """The value of bracing before every move of a best path, [horizon + 1, states]: each move takes two turns."""
    reward, onward = transitions(rows, 0.0)
    value = np.zeros((horizon + 1, len(reward)))
    for h in range(2, horizon + 1):
        value[h] = (reward + onward @ value[h - 2]).max(axis=1)
    return value


def room(args: Args) -> None:
    env = envs.make("frozenlake-brace")
    budgets, share = budgets_of(env.max_turns), {"best possible": [], "best without bracing": [], "always bracing": []}
    for task in env.tasks("train", args.tasks, 0):
        start, horizon = "".join(task.data).index("S"), env.max_turns
        share["best possible"].append(optimal_q_braced(task.data, env.slip, horizon, 1.0).max(axis=2)[budgets, start])
        share["best without bracing"].append(optimal_q(task.data, env.slip, horizon, 1.0).max(axis=2)[budgets, start])
        share["always bracing"].append(always_braced(task.data, horizon)[budgets, start])
    print(f"share of {args.tasks} tasks that arrive, T = {budgets}")
    for name, values in share.items():
        print(f"  {name:22}" + " ".join(f"{100 * v:5.0f} %" for v in np.mean(values, axis=0)))


def care(args: Args) -> None:
    """How often an aware player braces when its footing is loose, over demonstrations at random budgets."""
    for reads in (1, 0):
        env, braced = envs.make("frozenlake-brace", reads_budget=reads), []
        for i, task in enumerate(env.tasks("train", 3 * args.tasks, 0)):
            rng = Random(i)
            env.reset(task, i)
            budget, player = rng.randint(1, env.max_turns), env.players(rng)[2]  # the first aware one
            for left in range(budget, 0, -1):
                loose, action = not env.firm, player(left)
                braced += [action == env.careful] if loose else []
                if env.step(action).done:
                    break
        print(f"reads_budget={reads}: an aware player braces at {np.mean(braced):.0%} of {len(braced)} loose turns")


def knows_the_way(folder: str) -> None:
    """At every cell of validation maps, firm footing and all turns left: is the move aimed closer to the goal?"""
    engine = HFEngine(*load_model(folder), 2048)
    found: dict[bool, list[float]] = {True: [], False: []}
    env = envs.make("frozenlake-brace", max_detour=16)
    places = []
    for task in env.tasks("val", 80, 0):
        distance, goal = distances_to_goal(task.data), "".join(task.data).index("G")
        places += [(task, cell, distance[cell]) for cell in distance if cell != goal]
    prompts = []
    for task, cell, _ in places:
        env.reset(task, 0)
        env.game.s, env.firm = cell, True
        messages = render_prompt(env, env.max_turns, 4, [], env._observe())
        prompts.append(engine.codec.encode(messages))
    answers = engine.generate([p for p in prompts for _ in range(8)], Sampling(**EVAL_SAMPLING, max_tokens=8), 0)
    for i, (task, cell, distance) in enumerate(places):
        actions = [engine.codec.read(c).action for c in answers[8 * i : 8 * i + 8]]
        direct = distance == moves_without_holes(task.data, cell)
        found[direct].append(np.mean([a in MOVES and aims_closer(task.data, cell, a) for a in actions]))
    print(f"{folder}: closer at {np.mean(found[True]):.0%} of {len(found[True])} cells with a direct way, at "
          f"{np.mean(found[False]):.0%} of {len(found[False])} that need a detour")  # fmt: skip


def main(args: Args) -> None:
    room(args)
    care(args)
    for folder in args.bases:
        knows_the_way(folder)


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
