"""What paper A found, as numbers with a direction, and what other data say about each.

A verdict is a rule applied to an interval, not an opinion: a finding is *seen* when the whole 95 % interval of its number
lies on the paper's side of zero, *not seen* when it lies on the other side, *inconclusive* when zero is inside. A claim
that something does not get better has its sign turned. Where a finding speaks of several numbers (every K, say), it is
seen when all of them are, and not seen when one of them lies on the other side. Where what is compared with is already
within one point of the structural bound there is *no room* to see a gain (such K are left out, where there are others),
and from fewer than 10 tasks nothing is concluded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from comparison import FEWEST_TASKS, Comparison, fine, interval, markdown, signed
from dynamics import Curves
from likelihood import Likelihoods, llr_cells, llr_gap, matched_llr, plausible
from plots import Cell
from step_quality import Matched

RULE = (
    "*Seen*: the whole 95 % interval lies on the paper's side of zero. *Not seen*: it lies on the other side. "
    "*Inconclusive*: zero is inside. *No room*: what is compared with is within a point of the best that is possible. "
    "Full-budget GRPO stands for RL where the paper says RL. Pass differences are in points; other thresholds than zero "
    "stand beside the number."
)
FULL, MIX = "GRPO", "GRPO + BudgetMix"
ROOM = 1.0  # points below the structural bound


class Missing(Exception):
    """A run, a budget or a measurement that a finding speaks of was not given."""


@dataclass
class Finding:
    """A claim of the paper. `cells` are its numbers, turned so that above zero is the paper's side; or a word that says why
    there are none."""

    section: str
    claim: str
    paper: str
    here: str
    cells: list[Cell] | str

    def verdict(self) -> str:
        if isinstance(self.cells, str):
            return self.cells
        if np.isnan(self.cells).any():
            return "too few tasks"
        # The tolerance: two sums of equal numbers in another order differ by rounding.
        if all(low > 1e-9 for _, low, _ in self.cells):
            return "**seen**"
        return "**not seen**" if any(high < -1e-9 for _, _, high in self.cells) else "inconclusive"


def turned(cell: Cell) -> Cell:
    """For a claim that a number is *below* zero."""
    mean, low, high = cell
    return -mean, -high, -low


def less(cell: Cell, threshold: float) -> Cell:
    """For a claim that a number is above a threshold."""
    mean, low, high = cell
    return mean - threshold, low - threshold, high - threshold


Measured = tuple[str, list[Cell] | str]  # what is shown, and the cells


class Passes:
    """Numbers and their cells read off a comparison. What it does not hold raises Missing."""

    def __init__(self, result: Comparison):
        self.result = result

    def at(self, percent: int) -> int:
        if percent not in self.result.percents:
            raise Missing
        return self.result.percents.index(percent)

    def values(self, label: str, k: int, percent: int) -> np.ndarray:
        if label not in self.result.counts:
            raise Missing
        return self.result.values(label, k, self.at(percent))

    def cell(self, differences: np.ndarray) -> Cell:
        mean, low, high = interval(differences, bases=self.result.bases)
        return (mean, low, high) if differences.shape[1] >= FEWEST_TASKS else (mean, np.nan, np.nan)

    def difference(self, one: str, other: str, k: int, percent: int) -> Cell:
        return self.cell(self.values(one, k, percent) - self.values(other, k, percent))

    def full_up(self, label: str, k: int, percent: int) -> bool:
        """Whether a policy is so near the structural bound that no other can be seen to be better."""
        best = 100 * self.result.bound[self.at(percent)] if self.result.bound else 100.0
        return best - self.values(label, k, percent).mean() < ROOM

    def gain(self, one: str, other: str, k: int, percent: int) -> Measured:
        cell = self.difference(one, other, k, percent)
        return signed(cell), "no room" if self.full_up(other, k, percent) else [cell]

    def shrinking(self, label: str, k: int) -> Measured:
        """How much more a policy gains over the base at T_max than at 25 % of it."""
        tight, late = (self.values(label, k, p) - self.values("base", k, p) for p in (25, 100))
        cell = self.cell(late - tight)
        shown = f"gain {tight.mean():+.1f} at 25 %, {late.mean():+.1f} at T_max: {signed(cell)}"
        return shown, "no room" if self.full_up("base", k, 100) else [cell]


def judge(
    result: Comparison, found: dict[str, dict[str, Matched | Likelihoods]], curves: dict[str, Curves]
) -> list[Finding]:
    """All findings of paper A. `found[label]` holds the step quality and likelihoods of a way of training, `curves[label]`
    its probes (see analysis.py); what is not there is "not measured"."""
    judged: list[Finding] = []
    k = result.k

    def add(section: str, claim: str, paper: str, measure: Callable[[], Measured]) -> None:
        try:
            here, cells = measure()
        except Missing:
            here, cells = "", "not measured"
        judged.append(Finding(section, claim, paper, here, cells))

    # ---- looking things up ----

    pass_of = Passes(result)

    def part(label: str, name: str):
        if name not in found.get(label, {}):
            raise Missing
        return found[label][name]

    def probed(label: str) -> Curves:
        if label not in curves:
            raise Missing
        return curves[label]

    # ---- measuring ----

    def above_base_for_every_k() -> Measured:
        ks = result.ks(result.samples[pass_of.at(100)])
        cells = {j: pass_of.difference(FULL, "base", j, 100) for j in ks}
        roomy = [j for j in ks if not pass_of.full_up("base", j, 100)]
        shown = "; ".join(f"K={j}: {signed(cells[j])}" for j in ks if j in (1, 4, 16, ks[-1]))
        if len(roomy) < len(ks):
            shown += f" (no room from K={ks[len(roomy)]} on)"
        return shown, [cells[j] for j in roomy] or "no room"

    def shrinking(j: int) -> Callable[[], Measured]:
        return lambda: pass_of.shrinking(FULL, j)

    def gain(one: str, other: str, j: int, percent: int) -> Callable[[], Measured]:
        return lambda: pass_of.gain(one, other, j, percent)

    def parity(j: int) -> Measured:
        cell = pass_of.difference(MIX, FULL, j, 100)
        within = [less(cell, -3.0), less(turned(cell), -3.0)]
        return f"{signed(cell)} (seen: within 3 points)", "no room" if pass_of.full_up(FULL, j, 100) else within

    def matched(label: str, name: str, better: bool = True) -> Callable[[], Measured]:
        def measure() -> Measured:
            m = part(label, name)
            cell, (up, tied, down) = m.cell(m.difference), m.shares()
            shown = f"{fine(cell)}; better at {up:.1%}, tied {tied:.1%}, worse {down:.1%} of {len(m.base)}"
            return shown, [cell if better else turned(cell)]

        return measure

    def recovery() -> Measured:
        m = part(FULL, "recovery")
        cell = m.cell(100 * m.difference)
        return f"{100 * m.trained.mean():.1f} % against {100 * m.base.mean():.1f} %: {signed(cell)}", [cell]

    def deeper() -> Measured:
        cell = part(FULL, "quality").late_gain()
        return f"second half of T_max minus first: {fine(cell)}", [cell]

    def overlap() -> Measured:
        share = plausible(part(FULL, "likelihood"))
        return f"{fine(share, '')} of RL actions up to the base's own 95th percentile (seen: above 0.9)", [
            less(share, 0.9)
        ]

    def growing() -> Measured:
        scored = part(FULL, "likelihood")
        ends = [llr_cells(side, scored.bases, lambda s: s.llr[-1])[0] for side in (scored.trained, scored.base)]
        cell = llr_gap(scored)
        return f"{ends[0]:.2f} nats against {ends[1]:.2f}; on the same tasks {fine(cell)}", [cell]

    def length_matched() -> Measured:
        cell, pairs = matched_llr(part(FULL, "likelihood"))
        return f"{fine(cell)} nats, {pairs} pairs", [cell]

    def change(label: str, name: str, claim: Callable[[Cell], Cell] = lambda cell: cell) -> Callable[[], Measured]:
        def measure() -> Measured:
            cell = probed(label).cells(name, since=0)[-1]
            return fine(cell), [claim(cell)]

        return measure

    def probes_apart() -> Measured:
        full, mix = probed(FULL), probed(MIX)
        if full.bases != mix.bases or full.steps != mix.steps or (full.states != mix.states).any():
            raise Missing
        cell = interval(mix.single[-1] - full.single[-1], full.states, full.bases)
        return fine(cell), [cell]

    # ---- the findings, in the paper's order ----

    nats = "(Terminal-Bench)"
    add("3.1", "Pass@K of RL is above the base's for all K", "Figure 2, K up to 128", above_base_for_every_k)
    for j in dict.fromkeys((k, 1)):
        add("3.2", f"RL gains less at tight budgets (Pass@{j})", "Figure 3", shrinking(j))
    add(
        "3.3",
        "RL's single actions are not better on average",
        "better at 42.8 % of states",
        matched(FULL, "quality", False),
    )
    add("3.3", "RL's actions are better right after an error", "better at 65.7 % of states", matched(FULL, "errors"))
    add("3.3", "RL succeeds more often from error states", "51.3 % against 38.6 %", recovery)
    add("3.3", "RL's advantage in single actions grows with depth", "Figure 6", deeper)
    add(
        "4.1", "single RL actions are hardly more surprising to the base", f"mean NLL 12.2 against 10.3 {nats}", overlap
    )
    add("4.1", "the LLR of RL trajectories grows", f"228 nats against 26 {nats}", growing)
    add("E.2", "and does so at equal length", f"185.9 nats {nats}", length_matched)
    add("4.2", "R_multi rises in training", "+0.331 (DeepCoder-MT)", change(FULL, "multi"))
    add("4.2, E.3", "R_single falls meanwhile", "-0.097 (DeepCoder-MT)", change(FULL, "single", turned))
    stable = "stable or slightly better (seen: above -0.01)"
    add("5.4, E.3", "but not with BudgetMix", stable, change(MIX, "single", lambda cell: less(cell, -0.01)))
    add("E.3", "R_single ends higher with BudgetMix", "about +0.1", probes_apart)
    for j in dict.fromkeys((k, 1)):
        add("5.1", f"exact step rewards help at 25 % (Pass@{j})", "Figure 9", gain("GRPO + oracle", FULL, j, 25))
        add("5.1, D.1", f"GiGPO helps at 25 % (Pass@{j})", "Figure 9", gain("GiGPO", FULL, j, 25))
    add("E.1", "GiGPO's actions are better at matched states", "Figure 19", matched("GiGPO", "quality"))
    add("E.1", "and at error states", "Figure 20", matched("GiGPO", "errors"))
    add("E.1", "BudgetMix's actions are better at matched states", "Figure 21", matched(MIX, "quality"))
    add("E.1", "BudgetMix's actions are better at error states", "Figure 22", matched(MIX, "errors"))
    for j in dict.fromkeys((k, 1)):
        for percent, paper in ((25, "+7.5"), (50, "+5.3"), (75, "+4.0")):
            claim = f"BudgetMix is better than the full budget at {percent} % (Pass@{j})"
            add("5.4", claim, f"{paper} (Pass@8, mean of 4 tasks)", gain(MIX, FULL, j, percent))
        add("5.4", f"BudgetMix is better than the base at 25 % (Pass@{j})", "Table 1", gain(MIX, "base", j, 25))
        add("5.4", f"BudgetMix is on a par with the full budget at T_max (Pass@{j})", "parity", lambda j=j: parity(j))
    return judged


def effects(result: Comparison, full: str = FULL) -> list[Finding]:
    """The three effects that the laptop laboratory looks for (bench/laboratory.md), for an algorithm and its BudgetMix twin.

    E1 RL finds solutions that the base does not find in k attempts; E2 with full budgets it gains less where turns are few;
    E3 BudgetMix gains there and loses nothing where they are plenty. Empty where 25, 50 or 100 % of T_max was not measured.
    """
    mix, k, pass_of = f"{full} + BudgetMix", result.k, Passes(result)
    try:
        parity = pass_of.difference(mix, full, 1, 100)
        cost = signed(parity), [less(parity, -3.0)]
        rows = [
            ("E1", f"{full} raises Pass@{k} over the base at T_max", "above 0", *pass_of.gain(full, "base", k, 100)),
            ("E2", f"{full} gains less Pass@1 at 25 % than at T_max", "above 0", *pass_of.shrinking(full, 1)),
            ("E3", f"{mix} is better in Pass@1 at 25 %", "above 0", *pass_of.gain(mix, full, 1, 25)),
            ("E3", f"{mix} is better in Pass@1 at 50 %", "above 0", *pass_of.gain(mix, full, 1, 50)),
            ("E3", "and loses less than 3 points at T_max", "above -3", *cost),
        ]
    except Missing:
        return []
    return [Finding(*row) for row in rows]


PAPER = ("paper", "finding", "number there", "number here", "verdict")
LABORATORY = ("effect", "claim", "seen if", "number here", "verdict")


def table(judged: list[Finding], header: tuple[str, ...] = PAPER) -> str:
    head = markdown(header[0], list(header[1:]), {})[:-1]
    rows = [f"| {f.section} | {f.claim} | {f.paper} | {f.here or '-'} | {f.verdict()} |" for f in judged]
    return "\n".join([*head, *rows])
