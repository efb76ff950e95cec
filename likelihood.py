"""Likelihood: are the actions of a trained policy strange to its base, or only their composition? (paper A, 4.1)

Two numbers about recorded trajectories, with the histories kept fixed and everything scored at temperature 1:

    ActionNLL_B(a | h) = - sum over the tokens w_j of the action of log p_B(w_j | h, w_<j)
    LLR_1:t(trajectory) = sum over turns i <= t of [ log pi_RL(r_i | h_i) - log pi_B(r_i | h_i) ]

The first asks how surprising one action (not the reasoning around it) is to the base B; the second, over complete
responses r_i, how much more likely the whole trajectory is under the trained policy. Paper A finds that the single
actions overlap (mean NLL 12.2 for RL, 10.3 for base actions) while the LLR of successful RL trajectories grows to
hundreds of nats: locally plausible steps, composed into what the base would hardly ever sample.

A long trajectory has more terms in its sum than a short one. So the LLRs are also compared between base and RL
trajectories of the same task and like length (E.2).

What is scored is what was sampled: the recorded token ids, never a text encoded again. Both policies are one loaded
model with the adapter off and on.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from comparison import fine, interval_of, markdown
from engine import micro_batches, response_logprobs
from plots import Cell, curve, panels, save
from rollout import Trajectory, Turn

POINTS = 10  # at which cumulative LLRs are read off


@torch.no_grad()
def score(model, turns: list[Turn], pad: int, batch: int = 64, tokens: int = 16_384) -> list[np.ndarray]:
    """Log-probability of every response token of each turn at temperature 1, from the recorded ids: one [R_i] per turn."""
    scores: list = [None] * len(turns)
    for samples, members, rows in micro_batches(turns, batch, tokens):
        logp = response_logprobs(model, samples, pad).cpu().double().numpy()  # [U, R], right-aligned
        for turn, row in zip(members, rows, strict=True):
            scores[turn] = logp[row, logp.shape[1] - len(turns[turn].response_ids) :]
    return scores


def action_nll(turn: Turn, base_logp: np.ndarray) -> float:
    """ActionNLL_B of a turn in nats, over the tokens of its `action_span` alone. The turn must hold an action."""
    start, end = turn.action_span
    return float(-base_logp[start:end].sum())


@dataclass
class Scored:
    """A trajectory under both policies. `llr` [turns] is cumulative; `nll` and `action_tokens` are of the turns that
    hold an action; `tokens` counts all response tokens, the number of terms in the last LLR."""

    trajectory: Trajectory
    llr: np.ndarray
    nll: np.ndarray
    action_tokens: np.ndarray
    tokens: int


def score_trajectories(policy, trajectories: list[Trajectory], pad: int, batch: int = 64) -> list[Scored]:
    """Score trajectories under a policy (a PEFT model) and, with its adapter off, under its base."""
    turns = [turn for t in trajectories for turn in t.turns]
    with policy.disable_adapter():
        base = score(policy, turns, pad, batch)
    trained = score(policy, turns, pad, batch)
    scored, first = [], 0
    for t in trajectories:
        own = range(first, first + len(t.turns))
        first += len(t.turns)
        ratios = np.array([(trained[i] - base[i]).sum() for i in own])
        with_action = [i for i in own if turns[i].action_span is not None]
        nll = np.array([action_nll(turns[i], base[i]) for i in with_action])
        lengths = np.array([turns[i].action_span[1] - turns[i].action_span[0] for i in with_action])
        scored.append(Scored(t, ratios.cumsum(), nll, lengths, sum(len(base[i]) for i in own)))
    return scored


def at_progress(llr: np.ndarray, points: int) -> np.ndarray:
    """A cumulative LLR [turns] read off at 1/points, 2/points .. 1 of the trajectory: [points].

    Trajectories end at different turns; averaged turn by turn, the late part of a curve would come from the long ones
    only.
    """
    turns = [-(-len(llr) * p // points) for p in range(1, points + 1)]
    return llr[np.array(turns) - 1]


def length_matched(base: list[Scored], trained: list[Scored], tolerance: float = 0.1) -> list[tuple[Scored, Scored]]:
    """Pairs (base, trained) of the same task whose numbers of scored tokens differ by at most `tolerance` of the longer
    one's (E.2). Each trajectory is in one pair at most, and there are as many pairs as can be."""
    by_task: dict[str, tuple[list[Scored], list[Scored]]] = {}
    for side, scored in enumerate((base, trained)):
        for s in scored:
            by_task.setdefault(s.trajectory.task.id, ([], []))[side].append(s)
    pairs = []
    for both in by_task.values():
        ours, theirs = (sorted(side, key=lambda s: s.tokens) for side in both)
        i = j = 0
        # Walking both from the shortest: if the two do not match, the shorter one matches nothing that is left either.
        while i < len(ours) and j < len(theirs):
            a, b = ours[i].tokens, theirs[j].tokens
            if abs(a - b) <= tolerance * max(a, b):
                pairs.append((ours[i], theirs[j]))
                i, j = i + 1, j + 1
            elif a < b:
                i += 1
            else:
                j += 1
    return pairs


# ---- several runs ----


@dataclass
class Likelihoods:
    """Scored trajectories of one or several runs: of the base, of the trained policy."""

    base: list[list[Scored]]  # per run
    trained: list[list[Scored]]
    bases: list

    def join(self, other: "Likelihoods") -> "Likelihoods":
        """The trajectories of both, those of `other` as further runs."""
        return Likelihoods(self.base + other.base, self.trained + other.trained, self.bases + other.bases)


def llr_cells(runs: list[list[Scored]], bases: list, read) -> Cell:
    """(mean, low, high) over the successful trajectories of a number `read` off each; whole tasks are resampled."""
    return over_tasks([[(s.trajectory.task.id, read(s)) for s in run if s.trajectory.success] for run in runs], bases)


def over_tasks(
    runs: list[list[tuple[str, float]]], bases: list, within: tuple[float, float] = (-np.inf, np.inf)
) -> Cell:
    """(mean, low, high) of numbers given as (task id, number) per run."""
    number = {task: i for i, task in enumerate(sorted({task for run in runs for task, _ in run}))}
    flat = [(value, r, number[task]) for r, run in enumerate(runs) for task, value in run]
    return (
        interval_of(*map(np.array, zip(*flat, strict=True)), bases, within) if flat else interval_of([], [], [], bases)
    )


def llr_gap(result: Likelihoods) -> Cell:
    """(mean, low, high) of the difference in total LLR between successful trajectories of the trained policy and of the base:
    of their means on each task that both solved."""
    runs = []
    for sides in zip(result.base, result.trained, strict=True):
        totals: tuple[dict[str, list[float]], ...] = ({}, {})
        for side, scored in zip(totals, sides, strict=True):
            for s in scored:
                if s.trajectory.success:
                    side.setdefault(s.trajectory.task.id, []).append(s.llr[-1])
        base, trained = totals
        runs.append(
            [(task, np.mean(trained[task]) - np.mean(base[task])) for task in sorted(base.keys() & trained.keys())]
        )
    return over_tasks(runs, result.bases)


def matched_llr(result: Likelihoods) -> tuple[Cell, int]:
    """(mean, low, high) of the difference in total LLR between length-matched successful trajectories, and the number of
    pairs (E.2)."""
    won = [[[s for s in run if s.trajectory.success] for run in side] for side in (result.base, result.trained)]
    pairs = [length_matched(base, trained) for base, trained in zip(*won, strict=True)]
    numbers = [[(b.trajectory.task.id, t.llr[-1] - b.llr[-1]) for b, t in run] for run in pairs]
    return over_tasks(numbers, result.bases), sum(map(len, pairs))


def plausible(result: Likelihoods) -> Cell:
    """Share of the trained policy's actions that are no more surprising to the base than 95 % of its own: with an NLL
    under the base up to the 95th percentile of the base's own actions (taken as known)."""
    runs = []
    for base, trained in zip(result.base, result.trained, strict=True):
        own = np.concatenate([s.nll for s in base])
        limit = np.percentile(own, 95) if len(own) else np.nan
        runs.append([(s.trajectory.task.id, float(x <= limit)) for s in trained for x in s.nll if len(own)])
    return over_tasks(runs, result.bases, within=(0, 1))


# ---- pictures and tables ----


def plot_likelihood(path: Path, results: dict[str, Likelihoods]) -> None:
    """Per way of training: box plots of NLL under the base, per action and per token; the growth of the LLR; and the
    length-matched pairs."""
    figure, axes = panels(len(results), 4, width=2.9, height=2.5)
    for (action, token, growth, pairs), (label, result) in zip(axes, results.items(), strict=True):
        sides = {"base": result.base, "trained": result.trained}
        for axis, name in ((action, "action"), (token, "action token")):
            nll = [
                np.concatenate([s.nll / (s.action_tokens if axis is token else 1) for run in side for s in run])
                for side in sides.values()
            ]
            drawn = axis.boxplot(nll, widths=0.6, showfliers=False, patch_artist=True, tick_labels=list(sides),
                                 showmeans=True, medianprops={"color": "black"})  # fmt: skip
            for box, color in zip(drawn["boxes"], ("#56B4E9", "#CC79A7"), strict=True):
                box.set_facecolor(color)
            axis.set(ylabel=f"NLL per {name}, nats", xlabel=f"{' and '.join(str(len(x)) for x in nll)} actions")
        action.set_title(label, loc="left")
        x = np.arange(1, POINTS + 1) / POINTS
        for style, (name, side) in enumerate(sides.items()):
            cells = [llr_cells(side, result.bases, lambda s, p=p: at_progress(s.llr, POINTS)[p]) for p in range(POINTS)]
            won = sum(s.trajectory.success for run in side for s in run)
            curve(growth, x, cells, style, f"{name}, {won} won")
        growth.axhline(0, color="#555555", lw=1)
        growth.set(xlabel="share of the trajectory", ylabel="cumulative LLR, nats")
        growth.legend()
        (mean, low, high), count = matched_llr(result)
        pairs.bar([0], [mean], width=0.5, color="#0072B2", alpha=0.7)
        pairs.errorbar([0], [mean], [[mean - low], [high - mean]], color="black", capsize=6)
        pairs.axhline(0, color="#555555", lw=1)
        pairs.set(xticks=[0], xticklabels=["trained - base"], xlim=(-1, 1), ylabel="LLR difference, nats",
                  xlabel=f"{count} length-matched pairs")  # fmt: skip
    save(figure, path, "boxes: quartiles, line: median, triangle: mean; bands and bars: 95 % intervals")


def likelihood_table(results: dict[str, Likelihoods]) -> str:
    rows = {}
    for label, result in results.items():
        for name, side in (("base", result.base), ("trained", result.trained)):
            per_action = [[(s.trajectory.task.id, x) for s in run for x in s.nll] for run in side]
            per_token = [[(s.trajectory.task.id, x) for s in run for x in s.nll / s.action_tokens] for run in side]
            won = sum(s.trajectory.success for run in side for s in run)
            rows[f"{label}: {name}"] = [*(fine(over_tasks(x, result.bases), "") for x in (per_action, per_token)), str(won),
                                        fine(llr_cells(side, result.bases, lambda s: s.llr[-1]), "")]  # fmt: skip
    header = ["NLL per action", "NLL per action token", "successful trajectories", "their LLR"]
    lines = markdown("nats; trajectories of", header, rows)
    rows = {}
    for label, result in results.items():
        difference, pairs = matched_llr(result)
        rows[label] = [fine(difference), str(pairs), fine(plausible(result), "")]
    header = ["LLR, trained - base", "pairs", "actions no more surprising than 95 % of the base's"]
    return "\n".join([*lines, *markdown("length-matched", header, rows)])
