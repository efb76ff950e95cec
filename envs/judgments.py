"""The embedded corpus: invented judgments of invented parties, and questions whose answers stand in them.

No package ships real court judgments, and a test of a search agent should not be answerable from memory. So a seed makes
both, in a second and the same on every machine: judgments with parties, dates, courts, amounts, holdings and citations of
each other, laid out like Singapore's (paper B), and questions of four kinds:

    one       one paragraph of one judgment answers it
    two_hop   the answer stands in the case that another one followed: find the citation first
    two_docs  two judgments have to be compared
    none      no judgment answers it; the right answer is "I don't know"

Train, val and test are split by judgment: the judgments that answer the questions of one split answer none of another, and
a judgment follows judgments of its own split alone. All of them are searched together.

    id of a paragraph:  2021_SGCA_3:judgement:orders:p2        year_court_number : part : section : paragraph
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from envs.legal import Corpus, Question

JUDGMENTS, JUDGES = 130, 8
COURTS = {"SGCA": "Court of Appeal", "SGHC": "High Court", "SGDC": "District Court"}
YEARS = range(2017, 2024)
# Of ten judgments: six to train on, one to choose settings by, three to report on; in turn, so that all have all years.
SPLIT_OF = ("train", "test", "train", "train", "val", "test", "train", "train", "test", "train")

# Few names, each of them often: the embedded model has to learn to copy every one. SUMS are in dollars.
SURNAMES = """Tan Lim Lee Wong Goh Chua Koh Teo Kumar Singh Menon Nair Rahman Yusof Ahmad Pereira Shah Gupta""".split()
GIVEN = """Weiming Huiling Jiahua Kokseng Siewlan Boonhuat Cheekeong Meifong Liqi Xinjun Yongfeng Zhihao Anand Farid Priya
Nadia Rajan Aisha Daniel Grace Victor Helen Martin Rosa""".split()
FIRM = """Harbour Orchid Meridian Raffles Summit Lotus Granite Beacon Cedar Falcon Crescent Pioneer Sterling Zenith Coral
Bamboo Atlas Jade Mariner Nimbus Opal Regent Saffron Willow""".split()
TRADE = """Marine Builders Foods Textiles Chemicals Shipping Capital Energy Software Plastics""".split()
MONTHS = """January February March April May June July August September October November December""".split()
SUMS = [f"${n * 2500:,}" for n in range(2, 42)]

# What was agreed, what it is called afterwards, and what went wrong.
DISPUTES = [
    ("the lease of a warehouse", "lease", "left the premises before the term was over"),
    ("the building of a factory", "works", "left the works unfinished"),
    ("the sale of a barge", "sale", "refused to take delivery"),
    ("the supply of steel pipes", "supply", "delivered goods below the agreed grade"),
    ("the development of a payment system", "project", "missed every milestone"),
    ("the carriage of frozen goods", "carriage", "let the cargo thaw at the quay"),
    ("the sale of shares in a hotel", "share sale", "withheld the accounts"),
    ("the running of a canteen", "concession", "closed the canteen without notice"),
]
FILLER = {
    "introduction": [
        "The trial took six days and the documents fill nine volumes.",
        "The parties filed their closing submissions in good time.",
        "I reserved judgment and now give my reasons in full.",
        "The dispute is about {thing}, and the law on it is settled.",
        "Counsel on both sides narrowed the issues commendably.",
    ],
    "facts": [
        "The parties had dealt with each other for some years before the {word}.",
        "The negotiations were conducted mainly by electronic mail.",
        "{P} relied on a brochure that had been handed over at a trade fair.",
        "{D} was at that time short of staff and of working capital.",
        "A first draft of the agreement was returned with many comments.",
        "Nothing turns on the earlier drafts, which neither side signed.",
        "The relationship between {P} and {D} became strained within weeks.",
        "Several meetings were held, of which no minutes were kept.",
        "There were complaints about the {word}, most of them by telephone.",
        "{D} {wrong}, and {P} protested in writing.",
        "Attempts at mediation failed, and this action was begun.",
        "The correspondence after that date adds little.",
    ],
    "evidence": [
        "The first witness was candid and conceded points where it was proper to do so.",
        "The second witness had no recollection of the meetings.",
        "I found the bookkeeper of {D} an evasive witness.",
        "{P} was not shaken in cross-examination.",
        "The site records were kept by a junior clerk and are incomplete.",
        "The photographs were taken after the event and prove nothing.",
        "Objections to the bundle of documents were withdrawn on the second day.",
    ],
    "issues": [
        "The first issue is whether there was a binding agreement on {thing}.",
        "The second issue is whether {D} was in breach.",
        "The third issue is what loss, if any, {P} has proved.",
        "It was common ground that time was not of the essence.",
    ],
    "law": [
        "A contract is read as a reasonable person in the position of the parties would read it.",
        "The burden of proving loss lies on the party that claims it.",
        "A party cannot recover for loss that it could reasonably have avoided.",
        "Subsequent conduct is no guide to the meaning of a written agreement.",
        "An exclusion clause is construed against the party that relies on it.",
        "A repudiation has to be accepted before it brings the contract to an end.",
    ],
    "reasons": [
        "On the first issue I accept the submission of {P}.",
        "The conduct of {D} is hard to reconcile with its pleaded case.",
        "I do not accept that the {word} was ever abandoned by consent.",
        "The contemporaneous messages are a better guide than memory.",
        "There is nothing in the point that the notice was sent to the wrong address.",
        "The case for set-off was not pleaded and I say no more about it.",
        "Causation was established on the balance of probabilities.",
        "The claim for loss of reputation was rightly not pursued.",
    ],
    "orders": [
        "The parties are to agree the form of the order within fourteen days.",
        "There is liberty to apply.",
        "Interest runs at the usual rate until payment.",
    ],
}  # fmt: skip
FILLERS = {"introduction": 2, "facts": 9, "evidence": 4, "issues": 3, "law": 3, "reasons": 6, "orders": 2}

# A fact: the section it stands in, and how it is told. Between the names and the value stands a sentence (MIDDLE), as in
# real judgments, where paragraphs are long: the snippet of a search shows where to look, and reading shows what is so.
FACTS = {
    "judge": ("introduction", "The action of {P} against {D} was heard in the {court}. The judge was {value}."),
    "contract date": ("facts", "{P} and {D} signed a contract for {thing}. The date of signature was {value}."),
    "price": ("facts", "Under the contract {D} was to pay {P} a fixed price. The price agreed was {value}."),
    "deposit": ("facts", "A deposit was due from {D} to {P} on signature. The deposit came to {value}."),
    "termination date": ("facts", "{P} ended the contract with {D} by a letter. The termination was dated {value}."),
    "expert": (
        "evidence",
        "Expert evidence on loss was called in the action of {P} against {D}. The expert was {value}.",
    ),
    "precedent": (
        "law",
        "On remoteness, the reasoning in {P} against {D} follows an earlier decision. The precedent is {value}.",
    ),
    "outcome": ("orders", "The claim of {P} against {D} was brought for breach of contract. The claim is {value}."),
    "damages": ("orders", "{D} must compensate {P} in damages. The damages are fixed at {value}."),
    "costs": ("orders", "{D} and {P} were heard on costs. The costs of the action are fixed at {value}."),
}
MIDDLE = [
    "It has to be read together with what the parties did before and after.",
    "Nothing was made of this at the trial, and I can be brief about it.",
    "There was some debate about the details, which I need not set out here.",
    "The documents on the point are in order and were admitted without objection.",
    "I have considered what counsel on both sides had to say about this.",
    "This was in the end hardly in dispute between those who were there.",
]
ASKED = {
    "judge": ("Who was the judge in {case}?", "Which judge heard {case}?"),
    "contract date": ("When was the contract signed in {case}?", "What was the date of signature in {case}?"),
    "price": ("What was the contract price in {case}?", "What price was agreed in {case}?"),
    "deposit": ("How large was the deposit in {case}?", "What deposit was due in {case}?"),
    "termination date": ("When was the contract ended in {case}?", "What was the date of termination in {case}?"),
    "expert": ("Who gave expert evidence in {case}?", "Who was the expert in {case}?"),
    "precedent": ("Which earlier decision was followed in {case}?", "Which precedent did the court follow in {case}?"),
    "outcome": ("What became of the claim in {case}?", "What was the outcome in {case}?"),
    "damages": ("What damages were awarded in {case}?", "How high were the damages in {case}?"),
    "costs": ("What costs were fixed in {case}?", "How high were the costs in {case}?"),
}  # fmt: skip
# Comparisons of two cases, with the answers "yes" and "no".
SAME = {
    "judge": "Did the same judge hear {case} and {other}?",
    "outcome": "Was the outcome of the claim the same in {case} and {other}?",
}
KINDS = {"one": 8, "two_hop": 5, "two_docs": 4, "none": 3}  # of 20 questions


@dataclass(frozen=True)
class Judgment:
    """One invented case: `values` says of each fact what is so, `places` in which paragraph it stands."""

    id: str
    split: str
    plaintiff: str
    defendant: str
    values: dict[str, str]
    places: dict[str, str]

    @property
    def case(self) -> str:
        return f"{self.plaintiff} v {self.defendant}"

    @property
    def citation(self) -> str:
        """2021_SGCA_3 -> Tan Weiming v Lotus Foods [2021] SGCA 3, as courts cite."""
        return f"{self.case} {cite(self.id)}"


def cite(id: str) -> str:
    """2021_SGCA_3 -> [2021] SGCA 3."""
    year, court, number = id.split("_")
    return f"[{year}] {court} {number}"


def person(rng: Random) -> str:
    return f"{rng.choice(SURNAMES)} {rng.choice(GIVEN)}"


def firm(rng: Random) -> str:
    return f"{rng.choice(FIRM)} {rng.choice(TRADE)}"


def day(rng: Random, year: int) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {year}"


def write(
    rng: Random, id: str, split: str, parties: tuple[str, str], judge: str, earlier: list[Judgment]
) -> tuple[Judgment, list]:
    """One judgment and its paragraphs as (id, text)."""
    year, court, _ = id.split("_")
    thing, word, wrong = rng.choice(DISPUTES)
    sums = rng.sample(SUMS, 4)
    values = {
        "judge": f"Justice {judge}", "contract date": day(rng, int(year) - 3), "price": sums[0],
        "deposit": sums[1], "termination date": day(rng, int(year) - 2), "expert": f"Dr {person(rng)}",
        "outcome": rng.choice(("allowed", "dismissed")), "damages": sums[2], "costs": sums[3],
    }  # fmt: skip
    if values["outcome"] == "dismissed":
        del values["damages"]
    for fact in ("expert", "deposit"):  # what was not so is not told: questions about it have no answer
        if rng.random() < 0.25:
            del values[fact]
    if earlier and rng.random() < 0.8:
        values["precedent"] = rng.choice(earlier).citation
    told = {"P": parties[0], "D": parties[1], "thing": thing, "word": word, "wrong": wrong, "court": COURTS[court]}
    paragraphs, places = [], {}
    for section, fillers in FILLER.items():
        facts = [fact for fact in values if FACTS[fact][0] == section]
        plain = [" ".join(rng.sample(fillers, 2)).format(**told) for _ in range(FILLERS[section])]
        texts = [(fact, tell(rng, fact, told | {"value": values[fact]})) for fact in facts] + [("", t) for t in plain]
        rng.shuffle(texts)
        for i, (fact, text) in enumerate(texts, 1):
            place = f"{id}:judgement:{section}:p{i}"
            paragraphs.append((place, text))
            if fact:
                places[fact] = place
    return Judgment(id, split, *parties, values, places), paragraphs


def tell(rng: Random, fact: str, told: dict[str, str]) -> str:
    """The paragraph that states a fact."""
    what, value = FACTS[fact][1].split(". ")
    return f"{what}. {rng.choice(MIDDLE)} {value}".format(**told)


def ask(rng: Random, cases: list[Judgment]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(kind, question, answer, gold paragraphs) for the judgments of one split, without end."""
    by_citation = {case.citation: case for case in cases}
    followers = [case for case in cases if "precedent" in case.values]
    while True:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        case = rng.choice(followers if kind == "two_hop" else cases)
        if kind == "one":
            fact = rng.choice(sorted(case.values))
            yield kind, rng.choice(ASKED[fact]).format(case=case.case), case.values[fact], (case.places[fact],)
        elif kind == "two_hop":
            cited = by_citation[case.values["precedent"]]
            fact = rng.choice([f for f in ("judge", "damages", "costs", "expert", "price") if f in cited.values])
            text = rng.choice(ASKED[fact]).format(case=f"the case that was followed in {case.case}")
            yield kind, text, cited.values[fact], (case.places["precedent"], cited.places[fact])
        elif kind == "two_docs":
            fact, other = rng.choice(list(SAME)), rng.choice(cases)
            same = case.values[fact] == other.values[fact]
            if other is not case and same == (rng.random() < 0.5):
                places = (case.places[fact], other.places[fact])
                yield kind, SAME[fact].format(case=case.case, other=other.case), "yes" if same else "no", places
        elif kind == "none":
            missing = sorted(set(FACTS) - set(case.values))
            other = rng.choice(cases)  # two names that never met in court
            pair = f"{case.plaintiff} v {other.defendant}"
            if missing and rng.random() < 0.5:
                yield kind, rng.choice(ASKED[rng.choice(missing)]).format(case=case.case), "I don't know", ()
            elif all(pair != c.case for c in cases):
                yield kind, rng.choice(ASKED[rng.choice(sorted(FACTS))]).format(case=pair), "I don't know", ()


@lru_cache(maxsize=4)
def embedded(seed: int = 0, judgments: int = JUDGMENTS, per_judgment: int = 5) -> tuple[Corpus, tuple[Question, ...]]:
    """The corpus and its questions, `per_judgment` for each judgment."""
    rng = Random(f"judgments {seed}")
    judges = [person(rng) for _ in range(JUDGES)]
    firms = [firm(rng) for _ in range(judgments)]
    paragraphs, cases = [], []
    pairs = set()
    for i in range(judgments):
        year, split = YEARS[i * len(YEARS) // judgments], SPLIT_OF[i % len(SPLIT_OF)]
        court = rng.choice(sorted(COURTS))
        id = f"{year}_{court}_{i % 60 + 1}"
        while True:
            parties = (person(rng), rng.choice(firms))  # a firm is sued more than once: both names have to match
            if parties not in pairs:
                break
        pairs.add(parties)
        earlier = [c for c in cases if c.split == split and c.id[:4] < str(year)]
        case, own = write(rng, id, split, parties, rng.choice(judges), earlier)
        paragraphs += own
        cases.append(case)
    questions, seen = [], set()
    for split in ("train", "val", "test"):
        own = [case for case in cases if case.split == split]
        wanted = len(questions) + per_judgment * len(own)
        for kind, text, answer, sources in ask(rng, own):
            if text not in seen:
                seen.add(text)
                questions.append(Question(f"{split}-{len(questions)}", split, text, answer, sources, kind))
            if len(questions) == wanted:
                break
    return Corpus(paragraphs), tuple(questions)
