"""GiGPO: credit for single steps from outcome rewards alone, because trajectories of a group meet the same states.

GRPO praises every turn of a successful trajectory alike, the wasted ones too. But all members of a group play the same
task: when several of them stand in the same state with the same number of turns left, what they earned *from there on*
tells which of their actions was the better one. Such a meeting point is an anchor. No critic, no process reward:

    A_{i,t} = A_i + omega * A^S_{i,t}                                   paper A, A.2        (omega = 1)
    R_{i,t} = sum over u >= t of gamma^(u - t) * r_{i,u}                discounted return   (gamma = 0.95)
    A^S_{i,t} = (R_{i,t} - mean over the anchor) / (std over the anchor + eps)
    anchor of turn t: all turns of the group with the same (s_t, B - t) paper A, A.4

A_i is GRPO's advantage of the trajectory. Turns whose anchor has one member, or equal returns, get A^S = 0 and keep
A_i. The discount makes a return larger the sooner success comes, so among equal outcomes the quicker action is the
better one.

All members of a group have the same budget B, so equal turns left means the same turn number. r is what the environment
paid for the turn: 1 for the one that reached the goal, else 0. (Paper A is arXiv 2611.06483.)

Why the turns left belong into the anchor: a state with 20 turns to go is worth more than the same state with 2, and
comparing the two would blame the action for the clock. The original rule (Feng et al., 2025) takes the state alone:
`--anchor state`. There a trajectory that comes back to a state meets itself, and counts as often as it was there.

    python gigpo.py --env frozenlake

The training loop is grpo.py's. Left out on purpose: similarity matching of states (the anchors here are exact).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import grpo
from envs import UsageError
from grpo import group_advantages
from rollout import Trajectory, run_cli


def discounted_returns(rewards: list[float], gamma: float) -> list[float]:
    """R_t = r_t + gamma * R_{t+1}: one return per turn of one trajectory, in order (paper A, A.2)."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def anchors(group: list[Trajectory], anchor: str) -> dict[Hashable, list[tuple[int, int]]]:
    """{anchor key: its members as (trajectory index, turn index)} within one task and one group (paper A, A.4)."""
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for i, trajectory in enumerate(group):
        for t, turn in enumerate(trajectory.turns):
            key = (turn.state, turn.turns_left) if anchor == "state+budget" else turn.state
            members.setdefault(key, []).append((i, t))
    return members


def step_advantages(group: list[Trajectory], gamma: float, anchor: str = "state+budget") -> list[list[float]]:
    """A^S: one float per turn per trajectory of one group (paper A, A.2 and A.4).

    Normalised by mean and standard deviation over the anchor; the official code can also subtract the mean only
    (`mean_norm`), which keeps large differences of return large. Singletons and anchors of equal returns give exactly
    0: `group_advantages` decides that on the returns themselves.
    """
    returns = [discounted_returns([turn.reward for turn in t.turns], gamma) for t in group]
    advantages = [[0.0] * len(t.turns) for t in group]
    for meeting in anchors(group, anchor).values():
        relative = group_advantages([returns[i][t] for i, t in meeting])
        for (i, t), a in zip(meeting, relative, strict=True):
            advantages[i][t] = a
    return advantages


@dataclass
class Options:
    """What GiGPO adds to GRPO."""

    omega: float = 1.0
    """Weight of the step-level advantage."""
    gamma: float = 0.95
    """Discount per turn of the returns that anchors compare."""
    anchor: Literal["state+budget", "state"] = "state+budget"
    """What makes two turns comparable: state and turns left (paper A), or the state alone (the original rule)."""


@dataclass
class Args(grpo.Args, Options):
    """Full-budget GiGPO on an environment. Defaults that differ from paper A (A.2) name the paper's value."""


class AnchorCredit(grpo.GroupCredit):
    """GRPO's trajectory advantage plus the advantage within the anchor."""

    @staticmethod
    def check(args: Args) -> None:
        grpo.GroupCredit.check(args)
        if args.process_reward != "none":
            raise UsageError("GiGPO makes its step credit from outcomes: use --process-reward with grpo or ppo")
        if not 0 <= args.gamma <= 1 or not args.omega >= 0:
            raise UsageError(f"gamma must be in [0, 1] and omega not negative, not {args.gamma} and {args.omega}")

    def turn_advantages(self, group: list[Trajectory]) -> list[list[float]]:
        steps = step_advantages(group, self.args.gamma, self.args.anchor)
        both = zip(super().turn_advantages(group), steps, strict=True)
        return [[a + self.args.omega * s for a, s in zip(*pair, strict=True)] for pair in both]

    def assign(self, groups: list[list[Trajectory]]) -> tuple[list[list[float]], dict[str, float]]:
        advantages, _ = super().assign(groups)
        sizes = [len(meeting) for group in groups for meeting in anchors(group, self.args.anchor).values()]
        shared = [size for size in sizes if size > 1]
        return advantages, {
            # Watch these two: where states hardly recur (long texts, large worlds) GiGPO is GRPO with extra steps.
            "shared_anchor_turns": sum(shared) / max(1, sum(sizes)),
            "anchor_size": sum(sizes) / max(1, len(sizes)),
        }


def main(args: Args) -> None:
    grpo.run_alone(args, "gigpo", AnchorCredit)


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
