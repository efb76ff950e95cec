"""The scripted searchers: the expert finds what can be found and never peeks, and disguises are one to one."""

import re
from dataclasses import replace
from random import Random

import pytest

from chat import Completion, TextCodec
from envs.judgments import ASKED, FACTS, SAME, embedded
from envs.legal import Library
from rollout import State
from search_agent import Legal, SearchEpisode, parse_response
from search_players import Habits, Need, Searcher, disguise, imperfect, needs, pieces, put_on, state_value


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(embedded()[0], tmp_path_factory.mktemp("library"))  # keyword search embeds nothing


EXPERT = Habits()


def play(library, question, budget, habits=EXPERT, seed=0):
    env = Legal(library, embedded()[1])
    episode = SearchEpisode(env, TextCodec(), State(next(t for t in env.tasks(question.split, 1, 0)), 0, budget), 99)
    env.question = question
    episode.observation = f"Question: {question.text}"
    player = Searcher(env, Random(seed), habits)
    while not episode.done:
        episode.act(episode.prompt(), Completion((), (), True, player(episode.forced)))
    return episode


def test_what_a_question_needs():
    lim, tan = ("Lim Weiming", "Lotus Foods"), ("Tan Liqi", "Atlas Media")
    assert needs("Who was the judge in Lim Weiming v Lotus Foods?") == [Need(lim, "judge")]
    assert needs("How high were the costs in the case that was followed in Lim Weiming v Lotus Foods?") == [
        Need(lim, "precedent"),
        Need(("", ""), "costs"),
    ]
    same = "Did the same judge hear Lim Weiming v Lotus Foods and Tan Liqi v Atlas Media?"
    assert needs(same) == [Need(lim, "judge"), Need(tan, "judge")]
    assert needs("What is the meaning of life?") == []


def test_every_embedded_question_is_understood():
    for question in embedded()[1]:
        found = needs(question.text)
        assert len(found) == (2 if question.kind.startswith("two") else 1), question
    assert {need.fact for q in embedded()[1] for need in needs(q.text)} == set(FACTS) == set(ASKED) > set(SAME)


def test_values_are_read_from_the_paragraphs_that_state_them_and_no_others():
    corpus, questions = embedded()
    for question in questions:
        if question.kind == "one":
            fact = needs(question.text)[0].fact
            assert state_value(fact, corpus.texts[question.sources[0]]) == question.answer
            assert all(state_value(f, corpus.texts[question.sources[0]]) is None for f in FACTS if f != fact)


def test_the_expert_shows_the_ceiling(library):
    questions = [q for q in embedded()[1] if q.split == "train"][:150]
    right = {kind: [] for kind in ("one", "two_hop", "two_docs", "none")}
    for question in questions:
        episode = play(library, question, 10)
        SearchEpisode.settle([episode])
        right[question.kind].append(episode.trajectory.reward >= 1)
    share = {kind: sum(own) / len(own) for kind, own in right.items()}
    assert share["one"] > 0.9 and share["none"] > 0.9 and share["two_hop"] > 0.6 and share["two_docs"] > 0.7


def test_the_expert_never_sees_the_answer(library):
    """With the right answer and its sources taken away from the question it says the same."""
    for question in embedded()[1][:40]:
        blind = type(question)(question.id, question.split, question.text, "?", (), question.kind)
        assert [t.response for t in play(library, question, 10).trajectory.turns] == [
            t.response for t in play(library, blind, 10).trajectory.turns
        ]


def test_imperfect_searchers_are_sometimes_wrong_and_sometimes_malformed(library):
    rng, rewards, malformed = Random(0), [], 0
    questions = [q for q in embedded()[1] if q.split == "train"]
    for _ in range(200):
        habits = imperfect(rng)
        if habits.tool == "keyword_search" and habits != EXPERT:
            episode = play(library, rng.choice(questions), rng.randint(1, 10), habits, rng.randrange(99))
            SearchEpisode.settle([episode])
            rewards.append(episode.trajectory.reward)
            malformed += any(not t.valid for t in episode.trajectory.turns)
    bands = [sum(low <= r < low + 1 for r in rewards) / len(rewards) for low in (-1, 0, 1)]
    assert all(share > 0.1 for share in bands), "there is something to learn, and somebody to learn it from"
    assert 0 < malformed < len(rewards) / 3


def test_all_that_players_say_is_understood_but_their_slips(library):
    rng = Random(1)
    for question in embedded()[1][:60]:
        for turn in play(library, question, 5, replace(imperfect(rng), tool="keyword_search")).trajectory.turns:
            said = turn.response if turn.turns_left else "<answer>" + turn.response
            assert parse_response(said).tool or parse_response(said).answer or not turn.valid


def test_a_disguise_is_one_to_one_and_consistent():
    documents = embedded()[0].documents
    swapped = disguise(Random(0), documents)
    assert len(set(swapped.values())) == len(swapped) and set(swapped) == set(swapped.values())
    text = "Tan Weiming v Lotus Foods; $47,500. Tan owes $47,500 since 27 March 2019: "
    text += "2017_SGHC_9:judgement:law:p4, [2017] SGHC 9"
    seen = put_on(text, swapped)
    assert re.sub(r"\w+", "", seen) == re.sub(r"\w+", "", text) and seen != text
    assert put_on(seen, {v: k for k, v in swapped.items()}) == text
    changed = [a != b for a, b in zip(re.findall(r"\w+", text), re.findall(r"\w+", seen), strict=True)]
    kept = [word for word, other in zip(re.findall(r"\w+", text), changed, strict=True) if not other]
    assert set(kept) <= {"v", "owes", "since", "judgement", "law", "SGHC", "SGCA", "SGDC"}, kept
    year, court, number = re.search(r"(\d+)_(\w+)_(\d+)", seen).groups()
    assert seen.endswith(f"[{year}] {court} {number}"), "a case is cited by the id that it has now"


def test_the_fixed_text_of_the_prompt_is_a_handful_of_pieces():
    system = "Fixed words.\nMaximum number of turns: 10.\nMore fixed words."
    found = re.findall(
        pieces(system), system + '\n<answer>{"answer": "$48,500", "sources": ["2017_SGHC_9:judgement:law:p4"]}</answer>'
    )
    assert found[:3] == ["Fixed words.\nMaximum number of turns: ", "10", ".\nMore fixed words."]
    assert found[4:] == [
        "<answer>",
        '{"answer": "',
        "$48,500",
        '", "sources": ["',
        "2017_SGHC_9",
        ":judgement:law:p",
        "4",
        '"]}</answer>',
    ]
