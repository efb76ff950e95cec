"""Accuracy against turns: what more search is worth to whom (paper B, turn-restricted evaluation).

    accuracy(N) = share of held-out questions answered correctly when an answer is forced after N tool turns

and beside it the share that was also properly cited, which is what the reward counts as correct. "I don't know" is correct
where no document answers, and cites nothing. N = 0 is naive RAG. Every N is played anew, since the budget stands in the
prompt. All policies get the same questions with the same seeds; intervals resample questions and trainings, and
differences are paired (comparison.py). Two curves cross where the sign of their paired difference changes; a crossover is
reported only between two N at which the interval of that difference excludes zero, once on either side.

Each game is kept as one line with its 13 metrics (evaluate.play_and_keep), under a name that depends on the model, the
questions, the documents and the judge, so that nothing is played twice and nothing is compared that differs.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from comparison import interval, paired_interval
from envs import UsageError
from evaluate import fingerprint, play_and_keep
from judges import ExactJudge
from plots import Cell, curve, panels, save
from runs import make_folder, read_config, replace_file, write_json
from search_agent import Metrics, banded_reward

Game = dict[str, float]


def right(game: Game) -> float:
    return game["answer_correct"]


def cited(game: Game) -> float:
    return game["answer_correct"] and (game["sources_correct"] or game["returned_i_dont_know"])


def reward(game: Game) -> float:
    return banded_reward(Metrics(**{f.name: game[f.name] for f in fields(Metrics)}))


MEASURES = {"accuracy": right, "right and cited": cited}


def parse_turns(text: str) -> list[int]:
    """ "0-3,5,10" -> [0, 1, 2, 3, 5, 10]. Raises UsageError for anything else."""
    turns: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise UsageError(f"turns must be numbers and ranges such as 0-10 or 0,2,10, not {text!r}")
        low, high = int(first), int(last or first)
        if low > high or high > 1000:
            raise UsageError(f"turns must ascend and be at most 1000, not {part!r}")
        turns |= set(range(low, high + 1))
    return sorted(turns)


@dataclass
class Sweep:
    """The games of several policies: `games[label]` is [runs, turns, questions, samples]; `bases` names the base model of
    each run of a label."""

    turns: list[int]
    games: dict[str, list]
    bases: dict[str, list[str]]

    def values(self, label: str, turn: int, count: Callable[[Game], float]) -> np.ndarray:
        """A mean over samples, [runs, questions], of what `count` says of a game, at turn index `turn`."""
        return np.array([[np.mean([count(g) for g in games]) for games in run[turn]] for run in self.games[label]])

    def share(self, label: str, turn: int, count: Callable[[Game], float] = right) -> Cell:
        """Per cent of the games that count."""
        return interval(100 * self.values(label, turn, count), bases=self.bases[label], within=(0, 100))

    def difference(self, one: str, other: str, turn: int, count: Callable[[Game], float] = right) -> Cell:
        """Paired difference of such shares in points (`pair` says of which runs). NaN where there is nothing to pair."""
        a, b = (100 * self.values(label, turn, count) for label in (one, other))
        pairs = pair(self.bases[one], self.bases[other])
        if not pairs:
            return float("nan"), float("nan"), float("nan")
        left, right, bases = map(list, zip(*pairs, strict=True))
        return paired_interval(a[left], b[right], bases=bases)

    def mean(self, label: str, turn: int, name: str) -> float:
        return float(self.values(label, turn, lambda g: g[name]).mean())


def pair(one: list[str], other: list[str]) -> list[tuple[int, int, str]]:
    """Which runs of two policies to compare, given the base of each: [(index, index, base)]. Trainings on the same base are
    paired in order, the base itself with each of them; what has no base and one run (the expert) with every run."""
    common = [base for base in dict.fromkeys(one) if base in other]
    if not common and min(len(one), len(other)) == 1:
        return [(i, j, max(one, other, key=len)[max(i, j)]) for i in range(len(one)) for j in range(len(other))]
    pairs = []
    for base in common:
        left, right = ([i for i, b in enumerate(own) if b == base] for own in (one, other))
        alone = len(left) == 1 or len(right) == 1
        pairs += [(i, j, base) for i, j in (product(left, right) if alone else zip(left, right, strict=False))]
    return pairs


def sweep_file(policy, args) -> Path:
    """Where the games of a policy are kept."""
    adapter = ""
    if policy.run:
        try:
            adapter = hashlib.sha256((policy.run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(f"no usable adapter in {policy.run}: {error}") from None
    env = args.new_env()
    asked = [(q.id, q.text, q.answer, q.sources) for q in env.questions]
    judge = env.judge.name, "" if env.judge.name == ExactJudge.name else args.judge.address
    recipe = {"base": fingerprint(policy.base), "adapter": adapter, "sampling": args.sampling, "judge": judge}
    recipe |= {"thinking": args.thinking, "max_tokens": args.max_tokens, "split": args.split, "questions": asked}
    recipe |= {"documents": list(env.library.corpus.texts.items())}
    if str(policy.base).startswith("openai:"):
        recipe["endpoint"] = args.endpoint.address
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    name = re.sub("[/:]", "-", f"{policy.name}-{args.split}-{env.judge.name}")
    return args.out / "samples" / f"{name}-{digest}.jsonl"


def sweep(groups: dict[str, list[tuple[Any, Any]]], args) -> Sweep:
    """Play all that is missing. `groups[label]` has for each run a policy (evaluate.Policy, or the expert) and the arguments
    that it plays with."""
    turns = parse_turns(args.turns)
    columns = [(turn, args.n) for turn in turns]
    games, bases = {}, {}
    for label, runs in groups.items():
        games[label] = [
            play_and_keep(sweep_file(p, own), own, columns, p.name, partial(p.open_play, own, own.sampling))
            for p, own in runs
        ]
        bases[label] = [str(p.base) for p, _ in runs]
    return Sweep(turns, games, bases)


# ---- the report ----


def report(s: Sweep, args, runs: dict[str, list[Path]], first: str) -> str:
    """Write sweep.json, table.md and the pictures into a folder of `args.out`; returns the table. `first` is the label that
    the others are compared to."""
    folder = make_folder(args.out / args.name)
    judge, labels, last = args.new_env().judge, list(s.games), len(s.turns) - 1
    policy, versus = f"policy, at most {s.turns[last]} turns", f"difference to {first}"
    measures = [text for name in MEASURES for text in (f"{name}, %", versus)]
    head = (policy, *measures, "reward", "don't know, %", "turns", "searches")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for label in labels:
        rows.append(row(s, label, last, label, first))
    if 0 in s.turns:
        rows += [
            row(s, label, s.turns.index(0), f"naive RAG: {label}, 0 turns", first)
            for label in labels
            if label != "expert"
        ]
    table = "\n".join(rows)
    crossed = [c for i, a in enumerate(labels) for b in labels[i + 1 :] if (c := crossover(s, a, b))]
    notes = crossed or ["no two curves cross: no pair of policies differs significantly in both directions"]
    note = (
        f"{args.eval_tasks} {args.split} questions, {args.n} answers each at temperature {args.temperature:g}, judged by "
        f"{judge.name}; 95 % intervals"
    )
    games = [
        game for runs in s.games.values() for run in runs for turn in run for question in turn for game in question
    ]
    undecided = int(sum(game["no_verdict"] for game in games))
    if undecided:
        notes.append(f"{undecided} answers were held wrong because the judge gave no verdict on them")
    cells = {
        name: {label: [s.share(label, i, count) for i in range(len(s.turns))] for label in labels}
        for name, count in MEASURES.items()
    }
    write_json(folder / "sweep.json", {
        "judge": judge.name, "undecided": undecided, "temperature": args.temperature, "questions": args.eval_tasks,
        "split": args.split, "samples": args.n, "turns": s.turns, **cells, "bases": s.bases, "crossovers": crossed,
        "metrics": {label: [{k: s.mean(label, i, k) for k in s.games[label][0][0][0][0] if k not in ("task", "stop")}
                            for i in range(len(s.turns))] for label in labels},
    })  # fmt: skip
    by_turns = "\n\n".join(by_turns_table(s, name, own) for name, own in cells.items())
    text = "\n".join([table, "", by_turns, "", *[f"- {n}" for n in notes], "", note, ""])
    replace_file(folder / "table.md", lambda part: part.write_text(text))
    figure, (axes,) = panels(1, len(MEASURES), width=4.4, height=3.4)
    for axis, (name, own) in zip(axes, cells.items(), strict=True):
        for i, label in enumerate(labels):
            curve(axis, s.turns, own[label], i, label)
        axis.set(xlabel="tool turns allowed (0: naive RAG)", ylabel=f"{name}, %", ylim=(0, 100), xticks=s.turns)
    axes[0].legend()
    save(figure, folder / "turns.png", note)
    if runs:
        plot_found(runs, folder / "found.png")
    return text


def row(s: Sweep, label: str, turn: int, name: str, first: str) -> str:
    """One policy at one number of turns."""
    parts = [name]
    for count in MEASURES.values():
        versus = "" if label == first else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*s.difference(label, first, turn, count))
        parts += ["{:.1f} [{:.1f}, {:.1f}]".format(*s.share(label, turn, count)), versus]
    parts.append(f"{s.values(label, turn, reward).mean():+.2f}")
    parts.append(f"{100 * s.mean(label, turn, 'returned_i_dont_know'):.0f}")
    parts += [f"{s.mean(label, turn, effort):.1f}" for effort in ("num_turns", "num_searches")]
    return f"| {' | '.join(parts)} |"


def by_turns_table(s: Sweep, name: str, cells: dict[str, list[Cell]]) -> str:
    """One measure of every policy at every number of turns."""
    lines = [f"| {name}, % | " + " | ".join(f"{t} turns" for t in s.turns) + " |", "|---" * (len(s.turns) + 1) + "|"]
    for label, own in cells.items():
        lines.append(f"| {label} | " + " | ".join(f"{mean:.1f}" for mean, _, _ in own) + " |")
    return "\n".join(lines)


def crossover(s: Sweep, one: str, other: str) -> str:
    """Where a policy overtakes another, or ""."""
    signs = []
    for i, turns in enumerate(s.turns):
        _, low, high = s.difference(one, other, i)
        if low > 0 or high < 0:
            signs.append((turns, low > 0))
    for (before, was), (after, now) in zip(signs, signs[1:], strict=False):
        if was != now:
            return f"{one if now else other} overtakes {other if now else one} between {before} and {after} turns"
    return ""


def plot_found(runs: dict[str, list[Path]], path: Path) -> None:
    """The rate of episodes that found a right document against the training step (paper B's training figure), in means of as
    many steps as give the shortest run 20 of them; runs of one kind are drawn in one style."""
    figure, ((axis, other),) = panels(1, 2, width=4.2, height=3.0)
    judges = {read_config(folder)["judge"]["model"] for folders in runs.values() for folder in folders}
    kept = {
        label: [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
        for label, folders in runs.items()
    }
    size = max(1, -(-min(len(log) for logs in kept.values() for log in logs) // 20))  # steps in a mean
    for i, (label, logs) in enumerate(kept.items(), 1):
        steps = min(map(len, logs)) // size * size
        for panel, key in ((axis, "ever_found_right_doc"), (other, "answer_correct")):
            rates = 100 * np.array([[row[key] for row in log[:steps]] for log in logs])
            means = rates.reshape(len(logs), -1, size).mean(2)
            cells = [(m, lo, hi) for m, lo, hi in zip(means.mean(0), means.min(0), means.max(0), strict=True)]
            curve(panel, range(size, steps + 1, size), cells, i, label)
    axis.set(xlabel="training step", ylabel="found a right document, %", ylim=(0, 100))
    other.set(xlabel="training step", ylabel="answered correctly, %", ylim=(0, 100))
    axis.legend()
    said = f"means of {size} steps, on the questions of each step, judged by {' and '.join(sorted(judges))}"
    save(figure, path, f"{said}; bands: smallest and largest run")
