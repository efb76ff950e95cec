"""Scripted searchers of the embedded judgments: an expert, and the imperfect ones that the tiny base model imitates.

    question --names and fact--> search --snippet--> read --value--> (the case that was followed: once more) --> answer

The expert shows what the questions allow: it searches for the names of the parties and the word for the fact, reads the
paragraph whose snippet promises it, checks the names, cites what it used, and gives up after two searches in vain. It sees
what the model sees, snippets and texts, and never the right answer.

A pretrained model knows how to search, but not reliably. So each imperfect player has habits (`Habits`), good ones and
bad ones, drawn anew for every episode; their mixture is the base, and reinforcement learning has something to choose from.
Names, ids, dates and sums are exchanged for others in every demonstration (`disguise`): the model has to learn copying from
its prompt and cannot learn the documents by heart, which would be of no use on the documents of the test. Whatever is not
exchanged is learnt by heart: as long as paragraphs kept their numbers and dates their days, the base was right far more
often on training questions than on the test's, because it read and answered what it remembered.
"""

import json
import re
from dataclasses import dataclass, replace
from random import Random

from envs.judgments import ASKED, FACTS, FIRM, GIVEN, MONTHS, SAME, SUMS, SURNAMES, TRADE, cite
from envs.legal import Question

# The words that find a fact, and what its snippet says.
WORDS = {
    "judge": ("action heard", "was heard in"), "contract date": ("signed contract", "signed a"),
    "price": ("fixed price", "was to pay"), "deposit": ("deposit due", "was due from"),
    "termination date": ("ended letter", "ended the"), "expert": ("expert evidence", "on loss was"),
    "precedent": ("earlier decision", "follows an"), "outcome": ("claim brought", "was brought for"),
    "damages": ("compensate damages", "must compensate"), "costs": ("heard costs", "were heard on"),
}  # fmt: skip
CASE = r"([A-Z]\w+ [A-Z]\w+) v ([A-Z]\w+ [A-Z]\w+)"
HOP = "the case that was followed in "

THOUGHTS = {
    "search": "I search for the names and the fact.", "other words": "I try other words.",
    "read": "This paragraph may say it.",
    "next": "Now the other case.", "hop": "Now the case that was followed.", "answer": "I have what I need.",
    "give up": "The documents do not say.",
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    """One fact of one case that the answer needs."""

    parties: tuple[str, str]
    fact: str


def needs(text: str) -> list[Need]:
    """What a question asks for, in the order in which it has to be found. The case behind a hop is not known yet: its
    fact comes with no parties."""
    cases = re.findall(CASE, text)
    for fact, template in SAME.items():
        if text.startswith(template.split("{")[0]):
            return [Need(case, fact) for case in cases]
    asked = text.replace(HOP, "")
    for fact, templates in ASKED.items():
        if any(asked.startswith(t.split("{")[0]) for t in templates):
            return [Need(cases[0], "precedent"), Need(("", ""), fact)] if HOP in text else [Need(cases[0], fact)]
    return []


def state_value(fact: str, text: str) -> str | None:
    """The value that a paragraph gives for a fact, or None if it is about something else."""
    what, value = FACTS[fact][1].split(". ")
    lead = value.split("{")[0]
    cue = WORDS[fact][1]
    return text.rpartition(lead)[2].rstrip(".") if cue in text and lead in text else None


@dataclass(frozen=True)
class Habits:
    """What a searcher does well or badly. The defaults are the expert's."""

    query: str = "names and fact"  # or "question", "names", "fact": what is searched for
    tool: str = "keyword_search"
    k: int = 3
    reads: bool = True  # reads a paragraph before it answers from it
    picks: str = "promising"  # or "first", "any": the hit that is read
    checks: bool = True  # sees whether a paragraph is about the right case
    cites: str = "all"  # or "last", "document", "none", "too many"
    patience: int = 2  # searches for one fact before giving up
    second_look: bool = False  # searches once more although it has all it needs
    bluffs: bool = False  # invents an answer rather than admit that it does not know
    slips: float = 0.0  # share of responses with a format error


def imperfect(rng: Random) -> Habits:
    """A searcher with habits good and bad; one in two is an expert."""
    draw = rng.choices
    if rng.random() < 1 / 2:
        return Habits()
    return Habits(
        query=draw(["names and fact", "question", "names", "fact"], [8, 4, 3, 1])[0],
        tool=draw(["keyword_search", "semantic_search"], [5, 1])[0],
        k=draw([3, 5, 1], [8, 1, 1])[0],
        reads=rng.random() < 0.85,
        picks=draw(["promising", "first", "any"], [6, 3, 1])[0],
        checks=rng.random() < 0.5,
        cites=draw(["all", "last", "document", "none", "too many"], [5, 2, 1, 1, 1])[0],
        patience=draw([1, 2, 3], [1, 3, 1])[0],
        second_look=rng.random() < 0.15,
        bluffs=rng.random() < 0.5,
        slips=draw([0.0, 0.1], [3, 1])[0],
    )


class Searcher:
    """Plays one episode of search_agent.Legal: called with whether the answer is forced, it gives the next response."""

    def __init__(self, env, rng: Random, habits: Habits):
        self.env, self.rng, self.habits = env, rng, habits
        self.question: Question = env.question
        self.open = needs(self.question.text)
        self.found: list[tuple[str, str]] = []  # values with the ids that give them
        self.searches, self.heard, self.looked_again = 0, 0, False
        self.unread: list = []

    def __call__(self, forced: bool) -> str:
        self._listen()
        if forced:
            return self._answer()[len("<answer>") :]
        if self.rng.random() < self.habits.slips:
            return self._slip()
        if not self.open:
            if self.habits.second_look and not self.looked_again:
                self.looked_again = True
                return self._search("other words", self.question.text)
            return self._think("answer") + self._answer()
        if self.unread and self.habits.reads:
            return self._think("read") + self._call("read_document", id=self.unread.pop(0))
        if self.searches >= self.habits.patience or not self.open[0].parties[0]:
            return self._think("give up") + self._answer()
        return self._search("search" if not self.searches else "other words", self._query())

    # ---- what it understands ----

    def _listen(self) -> None:
        """Take in what has come back since the last call."""
        for tool, _, found in self.env.log[self.heard :]:
            if tool.endswith("search"):
                self._sift(found)
            else:
                for id, text in found:
                    self._take(id, text)
        self.heard = len(self.env.log)

    def _take(self, id: str, text: str) -> None:
        if not self.open:
            return
        need = self.open[0]
        value = state_value(need.fact, text)
        if value is None or (self.habits.checks and not all(name in text for name in need.parties)):
            return
        self.found.append((value, id))
        self.open.pop(0)
        self.searches, self.unread = 0, []
        if self.open and not self.open[0].parties[0]:
            case = re.search(CASE, value)
            self.open[0] = replace(self.open[0], parties=case.groups() if case else ("", ""))

    def _sift(self, hits: list) -> None:
        """Which of the hits are worth reading, best first."""
        if not self.open:
            return
        plain = [(hit.id, hit.snippet.replace("**", "")) for hit in hits]
        need, picks = self.open[0], self.habits.picks
        if not self.habits.reads:  # what a hasty one takes for the answer
            self.unread = [id for id, _ in plain[:1]]
        elif picks == "promising":
            named = [(id, text) for id, text in plain if all(name in text for name in need.parties)]
            self.unread = [id for id, text in named if WORDS[need.fact][1] in text][:1]
        else:
            self.unread = [
                id for id, _ in (plain[:1] if picks == "first" else self.rng.sample(plain, min(1, len(plain))))
            ]

    # ---- what it says ----

    def _think(self, thought: str) -> str:
        return f"<think>{THOUGHTS[thought]}</think>"

    def _call(self, tool: str, **arguments) -> str:
        return f"<tool>{json.dumps({'name': tool, 'arguments': arguments})}</tool>"

    def _search(self, thought: str, query: str) -> str:
        self.searches += 1
        if self.found and self.searches == 1 and self.open:
            thought = "hop" if self.question.kind == "two_hop" else "next"
        return self._think(thought) + self._call(self.habits.tool, query=query, k=self.habits.k)

    def _query(self) -> str:
        need, habit = self.open[0], self.habits.query
        if self.searches:  # the second attempt is another one
            habit = "names and fact" if habit != "names and fact" else "question"
        names, word = " ".join(need.parties), WORDS[need.fact][0]
        if habit == "question":
            return self.question.text if not self.found else f"{names} {need.fact}"
        return {"names": names, "fact": word}.get(habit, f"{names} {word}")

    def _answer(self) -> str:
        if self.open and not self.habits.bluffs:
            return self._say("I don't know", [])
        if self.open:
            return self._say(self._bluff(), [id for _, id in self.found] + self.unread[:1])
        values, ids = [value for value, _ in self.found], [id for _, id in self.found]
        is_same = any(self.question.text.startswith(t.split("{")[0]) for t in SAME.values())
        answer = ("yes" if values[0] == values[1] else "no") if is_same else values[-1] if values else "I don't know"
        seen = [id for id in self.env.seen()[0] if id not in ids]
        cited = {
            "all": ids, "last": ids[-1:], "document": [":".join(id.split(":")[:3]) for id in ids], "none": [],
            "too many": ids + sorted(seen)[: len(ids) + 1],
        }[self.habits.cites]  # fmt: skip
        return self._say(answer, cited)

    def _bluff(self) -> str:
        """Something of the right kind that has been seen, or a guess."""
        seen = " ".join(text for tool, _, found in self.env.log if not tool.endswith("search") for _, text in found)
        last = self.open[-1].fact
        guesses = re.findall(GUESS.get(last, r"$^"), seen)
        same = any(self.question.text.startswith(t.split("{")[0]) for t in SAME.values())
        usual = self.rng.choice(("yes", "no") if same else ("allowed", "dismissed"))
        return (
            self.rng.choice(guesses) if guesses and not same else usual if same or last == "outcome" else "I don't know"
        )

    def _say(self, answer: str, sources: list[str]) -> str:
        return f"<answer>{json.dumps({'answer': answer, 'sources': sources})}</answer>"

    def _slip(self) -> str:
        query = self._query() if self.open and self.open[0].parties[0] else self.question.text
        whole = self._call("keyword_search", query=query, k=3)
        return self.rng.choice([
            whole.removesuffix("</tool>"),
            whole.replace('"keyword_search"', '"search"'),
            whole.replace('"k": 3', '"k": 0'),
            whole.replace('}}</tool>', '}</tool>'),
        ])  # fmt: skip


PERSON = r"[A-Z]\w+ [A-Z]\w+"
GUESS = {
    "judge": rf"Justice {PERSON}", "expert": rf"Dr {PERSON}", "contract date": r"\d+ [A-Z]\w+ \d{4}",
    "termination date": r"\d+ [A-Z]\w+ \d{4}", "price": r"\$[\d,]+\d", "deposit": r"\$[\d,]+\d", "damages": r"\$[\d,]+\d",
    "costs": r"\$[\d,]+\d", "precedent": rf"{CASE} \[\d+\] \w+ \d+",
}  # fmt: skip


# ---- what the tiny model reads ----


DAYS, YEARS = [str(n) for n in range(1, 29)], [str(n) for n in range(2014, 2024)]
NUMBERS = [f":p{n}" for n in range(1, 16)]


def disguise(rng: Random, documents: list[str]) -> dict[str, str]:
    """{word: another word of its sort}, one to one: names of people and firms, months, sums, days, years, the numbers of
    paragraphs, and documents, whose ids and citations change alike."""
    swapped: dict[str, str] = {}
    for sort in (SURNAMES, GIVEN, FIRM, TRADE, MONTHS, SUMS, DAYS, YEARS, NUMBERS, documents):
        swapped |= zip(sort, rng.sample(sort, len(sort)), strict=True)
    return swapped | {cite(id): cite(swapped[id]) for id in documents}


DATE = r"\b\d{1,2}(?= [A-Z][a-z]+ \d{4})|(?<=[a-z] )\d{4}\b"  # the day and the year; the month is a word like others
DISGUISED = re.compile(rf"\d{{4}}_SG[A-Z]+_\d+|\[\d{{4}}\] SG[A-Z]+ \d+|:p\d+|{DATE}|\$[\d,]*\d|[A-Z][a-z]+")


def put_on(text: str, swapped: dict[str, str]) -> str:
    return DISGUISED.sub(lambda match: swapped.get(match[0], match[0]), text)


# One token each: a document's id or citation, the sections of an id, a sum, a mark, a word or a lone sign with its space.
WORD_PIECES = r"\d{4}_SG[A-Z]+_\d+|\[\d{4}\] SG[A-Z]+ \d+|(?::[a-z]+)+|\$[\d,]*\d|\*\*|</?[a-z]+>|\w+ ?|[^\w\s] ?|\s+"
SCAFFOLD = [
    *(f"<think>{thought}</think>" for thought in THOUGHTS.values()),
    *(f'<tool>{{"name": "{tool}", "arguments": {{"query": "' for tool in ("keyword_search", "semantic_search", "search")),
    '<tool>{"name": "read_document", "arguments": {"id": "', '", "k": ', "}}</tool>", "}</tool>", '"}}</tool>',
    '<answer>', '{"answer": "', '", "sources": ["', '", "sources": []}</answer>', '", "', '"]}</answer>', "I don't know",
    " | ", "Question: ", "system\n", "user\n", "assistant\n",
]  # fmt: skip


def pieces(system_prompt: str) -> str:
    """The pieces of text that become single tokens: the fixed lines of the prompt, the JSON around what varies, words."""
    fixed = sorted({*re.split(r"\d+", system_prompt), *SCAFFOLD} - {""}, key=lambda text: (-len(text), text))
    return "|".join([*map(re.escape, fixed), WORD_PIECES])
