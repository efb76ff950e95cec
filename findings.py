"""What paper A found, as numbers with a direction, and what other data say about each.

A verdict is a rule applied to an interval, not an opinion: a finding is *seen* when the whole 95 % interval of its number
lies on the paper's side of zero, *not seen* when it lies on the other side, *inconclusive* when zero is inside. A claim
that something does not get better has its sign turned. Where a finding speaks of several numbers (every K, say), it is
seen when all of them are, and not seen when one of them lies on the other side.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from comparison import Comparison, fine, interval, markdown, signed
from likelihood import Likelihoods, llr_cells, llr_gap, matched_llr, plausible
from plots import Cell
from step_quality import Curves, Matched

RULE = (
    "*Seen*: the whole 95 % interval lies on the paper's side of zero. *Not seen*: it lies on the other side. "
    "*Inconclusive*: zero is inside. Full-budget GRPO stands for RL where the paper says RL. Pass differences are in points."
)
FULL, MIX = "GRPO", "GRPO + BudgetMix"


@dataclass
class Finding:
    """A claim of the paper; its number is `cells`, turned so that above zero is the paper's side."""

    section: str
    claim: str
    paper: str
    here: str
    cells: list[Cell] = field(default_factory=list)

    def verdict(self) -> str:
        if not self.cells or np.isnan(self.cells).any():
            return "not measured"
        if all(low > 0 for _, low, _ in self.cells):
            return "**seen**"
        return "**not seen**" if any(high < 0 for _, _, high in self.cells) else "inconclusive"


def turned(cell: Cell) -> Cell:
    """For a claim that a number is *below* zero."""
    mean, low, high = cell
    return -mean, -high, -low


def less(cell: Cell, threshold: float) -> Cell:
    """For a claim that a number is above a threshold."""
    mean, low, high = cell
    return mean - threshold, low - threshold, high - threshold


def judge(
    result: Comparison, found: dict[str, dict[str, Matched | Likelihoods]], curves: dict[str, Curves]
) -> list[Finding]:
    """All findings of paper A. `found[label]` holds the step quality and likelihoods of a way of training, `curves[label]`
    its probes (see analysis.py); what is not there is "not measured"."""
    judged: list[Finding] = []
    last, k = int(np.argmax(result.budgets)), result.k
    at = {percent: i for i, percent in enumerate(result.percents)}
    ks = result.ks(result.samples[last])

    def add(section: str, claim: str, paper: str, measure: Callable[[], tuple[str, list[Cell]]]) -> None:
        """`measure` gives what is shown and the cells; it fails on a key that is missing where a run was not given."""
        try:
            here, cells = measure()
        except KeyError:
            here, cells = "", []
        judged.append(Finding(section, claim, paper, here, cells))

    def above_base_for_every_k():
        cells = [result.cell(FULL, k, last, "base") for k in ks]
        return "; ".join(f"K={k}: {signed(c)}" for k, c in zip(ks, cells, strict=True) if k in (1, 8, ks[-1])), cells

    def shrinking(k: int):
        def measure():
            late, tight = (result.values(FULL, k, b) - result.values("base", k, b) for b in (last, at[25]))
            gains = [interval(gain, bases=result.bases)[0] for gain in (tight, late)]
            cell = interval(late - tight, bases=result.bases)
            return f"gain {gains[0]:+.1f} at 25 %, {gains[1]:+.1f} at T_max: {signed(cell)}", [cell]

        return measure

    def gain(one: str, other: str, k: int, percent: int):
        def measure():
            cell = result.cell(one, k, at[percent], other)
            return signed(cell), [cell]

        return measure

    def matched(label: str, part: str, better: bool = True):
        def measure():
            m = found[label][part]
            cell, (up, tied, down) = m.cell(m.difference), m.shares()
            shown = f"{fine(cell)}; better at {up:.1%}, tied {tied:.1%}, worse {down:.1%} of {len(m.base)}"
            return shown, [cell if better else turned(cell)]

        return measure

    def recovery():
        m = found[FULL]["recovery"]
        cell = m.cell(100 * m.difference)
        return f"{100 * m.trained.mean():.1f} % against {100 * m.base.mean():.1f} %: {signed(cell)}", [cell]

    def deeper():
        cell = found[FULL]["quality"].late_gain()
        return f"second half of T_max minus first: {fine(cell)}", [cell]

    def overlap():
        share = plausible(found[FULL]["likelihood"])
        return f"{fine(share, '')} of RL actions within the base's own central 95 % (seen: above 0.9)", [
            less(share, 0.9)
        ]

    def growing():
        result = found[FULL]["likelihood"]
        ends = [llr_cells(side, result.bases, lambda s: s.llr[-1])[0] for side in (result.trained, result.base)]
        cell = llr_gap(result)
        return f"{ends[0]:.2f} nats against {ends[1]:.2f}; on the same maps {fine(cell)}", [cell]

    def length_matched():
        cell, pairs = matched_llr(found[FULL]["likelihood"])
        return f"{fine(cell)} nats, {pairs} pairs", [cell]

    def change(label: str, name: str, falls: bool):
        def measure():
            cell = curves[label].cells(name, since=0)[-1]
            return fine(cell), [turned(cell) if falls else cell]

        return measure

    def probes_apart():
        full, mix = curves[FULL], curves[MIX]
        cell = interval(mix.single[-1] - full.single[-1], full.states, full.bases)
        return fine(cell), [cell]

    def parity(k: int):
        def measure():
            cell = result.cell(MIX, k, last, FULL)
            return f"{signed(cell)} (seen: within 3 points)", [less(cell, -3.0), less(turned(cell), -3.0)]

        return measure

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
        "4.1",
        "single RL actions stay plausible under the base",
        "mean NLL 12.2 against 10.3 nats (Terminal-Bench)",
        overlap,
    )
    add("4.1", "the LLR of RL trajectories grows", "228 nats against 26 (Terminal-Bench)", growing)
    add("E.2", "and does so at equal length", "185.9 nats (Terminal-Bench)", length_matched)
    add("4.2", "R_multi rises in training", "+0.331 (DeepCoder-MT)", change(FULL, "multi", falls=False))
    add("4.2, E.3", "R_single falls meanwhile", "-0.097 (DeepCoder-MT)", change(FULL, "single", falls=True))
    add("E.3", "R_single ends higher with BudgetMix", "about +0.1", probes_apart)
    for j in dict.fromkeys((k, 1)):
        add("5.1", f"exact step rewards help at 25 % (Pass@{j})", "Figure 9", gain("GRPO + oracle", FULL, j, 25))
        add("5.1, D.1", f"GiGPO helps at 25 % (Pass@{j})", "Figure 9", gain("GiGPO", FULL, j, 25))
    add("E.1", "GiGPO's actions are better at matched states", "Figure 19", matched("GiGPO", "quality"))
    add("E.1", "and at error states", "Figure 20", matched("GiGPO", "errors"))
    add("E.1", "BudgetMix's actions are better at matched states", "Figure 21", matched(MIX, "quality"))
    for j in dict.fromkeys((k, 1)):
        for percent, paper in ((25, "+7.5"), (50, "+5.3"), (75, "+4.0")):
            claim = f"BudgetMix is better than the full budget at {percent} % (Pass@{j})"
            add("5.4", claim, f"{paper} (Pass@8, mean of 4 tasks)", gain(MIX, FULL, j, percent))
        add("5.4", f"and on a par at T_max (Pass@{j})", "parity", parity(j))
    return judged


def table(judged: list[Finding]) -> str:
    head = markdown("paper", ["finding", "number there", "number here", "verdict"], {})[:-1]
    rows = [f"| {f.section} | {f.claim} | {f.paper} | {f.here or '-'} | {f.verdict()} |" for f in judged]
    return "\n".join([*head, *rows])
