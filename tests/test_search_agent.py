"""The protocol of the search agent: every malformed response has its flag and its band, and no reward leaves its band."""

import itertools
import json
from dataclasses import fields

import pytest

from chat import Completion, TextCodec
from envs import Task, UsageError
from envs.legal import Corpus, Library, Question
from grpo import group_advantages
from rollout import State
from search_agent import (
    MOST_CHARACTERS,
    Legal,
    Metrics,
    Response,
    SearchEpisode,
    banded_reward,
    parse_response,
    read_json,
)

PARAGRAPHS = [
    ("2019_SGCA_1:judgement:orders:p1", "Lotus Foods must compensate Tan Wei Ming. The damages are fixed at $48,500."),
    ("2019_SGCA_1:judgement:orders:p2", "There is liberty to apply."),
    ("2019_SGCA_1:judgement:law:p1", "The reasoning follows an earlier decision, Lim v Goh [2018] SGHC 2."),
    ("2018_SGHC_2:judgement:orders:p1", "The costs of the action are fixed at $7,000. The claim is dismissed."),
]
GOLD, OTHER = PARAGRAPHS[0][0], PARAGRAPHS[3][0]
ONE = Question("q1", "test", "What damages were awarded to Tan Wei Ming?", "$48,500", (GOLD,))
TWO = Question("q2", "test", "Which costs?", "$7,000", (PARAGRAPHS[2][0], OTHER), "two_hop")
NONE = Question("q3", "test", "Who was the expert?", "I don't know", (), "none")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(Corpus(PARAGRAPHS), tmp_path_factory.mktemp("library"))


def start(library, question=ONE, budget=3):
    env = Legal(library, (ONE, TWO, NONE))
    return SearchEpisode(env, TextCodec(), State(Task(question.id, "test", question), 0, budget), history=100)


def play(library, *responses, question=ONE, budget=3, finished=True):
    """An episode in which the model says these things, one after the other."""
    episode = start(library, question, budget)
    for response in responses:
        assert not episode.done
        episode.act(episode.prompt(), Completion((), (), finished, response))
    SearchEpisode.settle([episode])
    return episode


def tool(name, **arguments):
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


def answer(text, *sources):
    return f"<answer>{json.dumps({'answer': text, 'sources': sources})}</answer>"


SEARCH, READ = tool("keyword_search", query="damages Tan Wei Ming", k=2), tool("read_document", id=GOLD)


# ---- reading responses ----


def test_what_is_well_formed():
    assert parse_response(SEARCH) == Response("keyword_search", ("damages Tan Wei Ming", 2))
    assert parse_response("<think>one <tool> of these</think>\nso: " + READ) == Response("read_document", (GOLD,))
    assert parse_response(tool("semantic_search", query=" x ")) == Response("semantic_search", ("x", 5))
    assert parse_response(answer("$48,500", GOLD, GOLD)) == Response(answer="$48,500", sources=(GOLD,))
    assert parse_response("<answer>I don't know</answer>") == Response(answer="I don't know")
    assert parse_response('<answer>{"answer": 7}</answer>').answer == "7"


PARSE, NAME, ARGS, IDS = "cant_parse_tool_call", "bad_tool_call_name", "bad_tool_call_args", "bad_sources_id"
# One malformed response, the flag it sets, and the band in which an episode ends that goes on in silence: -2 for a format
# error and no answer, -1 for a wrong answer, 1 for one that is right in spite of its odd form.
MALFORMED = {
    "no tags": ("the damages are $48,500", PARSE, -2),
    "tool never closed": (SEARCH.removesuffix("</tool>"), PARSE, -2),
    "answer never closed": ('<answer>{"answer": "$48,500"}', PARSE, -2),
    "two tools": (SEARCH + READ, PARSE, -2),
    "tool and answer": (SEARCH + answer("$48,500", GOLD), PARSE, -2),
    "answer and tool": (answer("$48,500", GOLD) + SEARCH, PARSE, -2),
    "bad JSON": ("<tool>{'name': 'keyword_search'}</tool>", PARSE, -2),
    "JSON, but no call": ("<tool>[1, 2]</tool>", PARSE, -2),
    "a key twice": ('<tool>{"name": "read_document", "name": "x", "arguments": {}}</tool>', PARSE, -2),
    "not a number": ('<tool>{"name": "keyword_search", "arguments": {"query": "x", "k": NaN}}</tool>', PARSE, -2),
    "endless nesting": ("<tool>" + '{"a":' * 100_000, PARSE, -2),
    "nested tools": (f"<tool>{SEARCH}</tool>", PARSE, -2),
    "nested answers": (f"<answer>{answer('$48,500', GOLD)}</answer>", PARSE, -2),
    "thinking never closed": ("<think>" + SEARCH, PARSE, -2),
    "empty response": ("", PARSE, -2),
    "empty answer": ('<answer>{"answer": " ", "sources": []}</answer>', PARSE, -2),
    "answer with nothing in it": ("<answer></answer>", PARSE, -2),
    "answer that is a list": ('<answer>{"answer": ["$48,500"]}</answer>', PARSE, -2),
    "unknown tool": (tool("delete_document", id=GOLD), NAME, -2),
    "tool name that is no text": ('<tool>{"name": ["read_document"], "arguments": {}}</tool>', NAME, -2),
    "missing argument": (tool("keyword_search", k=3), ARGS, -2),
    "extra argument": (tool("read_document", id=GOLD, page=2), ARGS, -2),
    "arguments that are no object": ('<tool>{"name": "keyword_search", "arguments": "damages"}</tool>', ARGS, -2),
    "query that is no text": (tool("keyword_search", query=7), ARGS, -2),
    "query of nothing": (tool("keyword_search", query="  "), ARGS, -2),
    "query without end": (tool("keyword_search", query="damages " * 10_000), ARGS, -2),
    "k = -1": (tool("keyword_search", query="damages", k=-1), ARGS, -2),
    "k = ten": (tool("keyword_search", query="damages", k="ten"), ARGS, -2),
    "k = 10^9": (tool("semantic_search", query="damages", k=10**9), ARGS, -2),
    "k = true": (tool("semantic_search", query="damages", k=True), ARGS, -2),
    "k = 2.0": (tool("semantic_search", query="damages", k=2.0), ARGS, -2),
    "id that does not exist": (tool("read_document", id="2019_SGCA_99"), ARGS, -2),
    "id that is half of one": (tool("read_document", id="2019_SGCA_1:judge"), ARGS, -2),
    "source that does not exist": (answer("$48,500", GOLD, "2019_SGCA_99"), IDS, -1),
    "source of another document": (answer("$48,500", OTHER), None, -1),
    "sources that are no list": (f'<answer>{{"answer": "$48,500", "sources": "{GOLD}"}}</answer>', IDS, -1),
    "sources that are no texts": (f'<answer>{{"answer": "$48,500", "sources": ["{GOLD}", 7]}}</answer>', IDS, -1),
    "no sources": ('<answer>{"answer": "$48,500"}</answer>', None, -1),
    "answer without JSON": ("<answer>$48,500</answer>", None, -1),
    "answer of 100 kB": (answer("x" * 100_000, GOLD), None, -1),
    "hedged ignorance": (answer("I don't know, perhaps $48,500", GOLD), None, -1),
    "</tool> inside a string": (tool("keyword_search", query="damages </tool> Tan"), None, -1),
    "unicode": (answer("\uff04\uff14\uff18,\uff15\uff10\uff10", GOLD), None, 1),  # full-width $48,500
    "lone surrogate": (answer("\ud800", GOLD), None, -1),
    "right-to-left and zero width": (tool("keyword_search", query="\u202edamages\u200b"), None, -1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_responses_have_their_flag_and_their_band(library, name):
    text, flag, band = MALFORMED[name]
    episode = start(library, budget=1)
    episode.act(episode.prompt(), Completion((), (), True, text))
    if not episode.done:
        assert episode.turns_left == 0, "whatever it was, the turn is spent"
        episode.act(episode.prompt(), Completion((), (), True, ""))  # silence, even when an answer is asked for
    SearchEpisode.settle([episode])
    raised = {f for f in (PARSE, NAME, ARGS, IDS) if getattr(episode.metrics, f)}
    assert raised == ({flag} if flag else set())
    assert band <= episode.trajectory.reward <= band + 1 and (band != -2 or episode.trajectory.reward < -1)
    assert json.dumps(episode.trajectory.record())


def test_the_model_is_told_what_was_wrong_and_may_go_on(library):
    episode = play(library, tool("keyword_search", query="damages", k="ten"), READ, answer("$48,500", GOLD))
    told = episode.trajectory.turns[1].observation
    assert "k must be a whole number from 1 to 50" in told and "The turn is spent" in told
    assert episode.metrics.bad_tool_call_args and 1 <= episode.trajectory.reward <= 2
    smooth = play(library, READ, READ, answer("$48,500", GOLD))
    assert episode.trajectory.reward < smooth.trajectory.reward, "an error that was recovered from costs a little"


def test_a_response_that_was_cut_off_is_no_answer(library):
    episode = start(library, budget=1)
    episode.act(episode.prompt(), Completion((), (), False, answer("$48,500", GOLD)))
    assert not episode.done and episode.metrics.cant_parse_tool_call
    assert "cut off" in episode.observation


@pytest.mark.parametrize("text", ["", "x", '{"a": 1', '{"a": 1, "a": 2}', "[" * 100_000, "NaN", "-Infinity"])
def test_json_that_is_none_is_a_value_error(text):
    with pytest.raises(ValueError):
        read_json(text)
    assert read_json(' {"a": [1]} rest') == ({"a": [1]}, 11)


# ---- the bands ----


def metrics(**values) -> Metrics:
    return Metrics(**values)


RIGHT = {"answer_correct": True, "attempted_answer": True, "sources_correct": True}
# Worked by hand from the head of search_agent.py.
BANDS = [
    (RIGHT | {"num_turns": 1, "num_searches": 1}, 1.9),  # 1 + 1 - 2/20
    (RIGHT | {"num_turns": 3, "num_searches": 1}, 1.8),  # 1 + 1 - 4/20
    (RIGHT | {"num_turns": 3, "num_searches": 1, PARSE: True}, 1.72),  # 1 + 0.8 * 0.9
    (RIGHT | {"num_turns": 3, "num_searches": 1, PARSE: True, NAME: True, ARGS: True}, 1.56),  # 1 + 0.8 * 0.7
    (RIGHT | {"num_turns": 10, "num_searches": 10}, 1.0),
    (RIGHT | {"num_turns": 500, "num_searches": 400}, 1.0),  # clamped
    (RIGHT | {"num_turns": 0, "num_searches": 0}, 2.0),
    (RIGHT | {"sources_correct": False, "num_right_docs_found": 1}, -0.9),  # a right answer without proper citations
    ({"returned_i_dont_know": True, "answer_correct": True}, 1.0),  # there was nothing to know
    ({"returned_i_dont_know": True, "answer_correct": True, PARSE: True}, 0.9),
    ({"returned_i_dont_know": True}, 0.0),  # a document does answer
    ({"returned_i_dont_know": True, "num_right_docs_found": 3, ARGS: True}, 0.0),  # no error leads out of the band
    ({"attempted_answer": True}, -1.0),
    ({"attempted_answer": True, "num_right_docs_found": 3}, -0.7),
    ({"attempted_answer": True, "num_right_docs_found": 3, ARGS: True}, -0.73),  # -1 + 0.3 * 0.9
    ({"attempted_answer": True, "num_right_docs_found": 10}, 0.0),
    ({"attempted_answer": True, "num_right_docs_found": 99}, 0.0),  # capped
    ({"attempted_answer": True, "bad_sources_id": True}, -1.0),
    ({"ran_out_of_turns": True, "num_right_docs_found": 2}, -0.8),
    ({}, -1.0),  # the context was full
    ({PARSE: True}, -4 / 3),
    ({PARSE: True, "ran_out_of_turns": True, "num_right_docs_found": 5}, -4 / 3),
    ({NAME: True, ARGS: True}, -5 / 3),
    ({PARSE: True, NAME: True, ARGS: True}, -2.0),
]


@pytest.mark.parametrize("values, reward", BANDS)
def test_rewards_worked_by_hand(values, reward):
    assert banded_reward(metrics(**values)) == pytest.approx(reward)


def test_no_reward_leaves_its_band():
    flags = ("answer_correct", "sources_correct", "ever_found_right_doc", "ever_read_right_doc", PARSE, NAME, ARGS)
    for ending, values in itertools.product(("idk", "answer", "none"), itertools.product((False, True), repeat=7)):
        for found, effort in itertools.product((0, 1, 12), (0, 5, 40)):
            counts = {"num_right_docs_found": found, "num_turns": effort, "num_searches": effort}
            ended = {"returned_i_dont_know": ending == "idk", "attempted_answer": ending == "answer"}
            m = metrics(**dict(zip(flags, values, strict=True)), **counts, **ended)
            errors = m.cant_parse_tool_call or m.bad_tool_call_name or m.bad_tool_call_args
            right = m.answer_correct and m.sources_correct
            low = {"idk": 0, "answer": 1 if right else -1, "none": -2 if errors else -1}[ending]
            assert low <= banded_reward(m) <= low + 1


def test_flags_default_to_false_and_counts_to_zero():
    assert all(getattr(Metrics(), f.name) == 0 for f in fields(Metrics))
    assert len(fields(Metrics)) == 14, "the paper's thirteen and the count for the partial credit"


def test_a_group_of_failures_is_not_blown_up():
    assert max(map(abs, group_advantages([-1.0, -0.9, -1.0, -0.9, -1.0, -0.9], min_std=0.25))) < 0.5
    assert max(map(abs, group_advantages([-1.0, -0.9, -1.0, -0.9, -1.0, -0.9]))) > 0.9, "which is what would happen"


# ---- episodes ----


def test_the_metrics_of_a_good_episode(library):
    episode = play(library, SEARCH, READ, answer("The damages were $48,500.", GOLD))
    m = episode.metrics
    assert (m.answer_correct, m.sources_correct, m.attempted_answer) == (True, True, True)
    assert (m.ever_found_right_doc, m.ever_read_right_doc, m.num_right_docs_found) == (True, True, 1)
    assert (m.num_turns, m.num_searches, m.ran_out_of_turns) == (3, 1, False)
    assert episode.trajectory.reward == pytest.approx(1.8) and episode.trajectory.success
    assert [t.reward for t in episode.trajectory.turns] == [0, 0, episode.trajectory.reward]
    assert [t.turns_left for t in episode.trajectory.turns] == [3, 2, 1]


@pytest.mark.parametrize(
    "cited, proper",
    [
        ([PARAGRAPHS[2][0], OTHER], True),
        ([PARAGRAPHS[2][0], OTHER, GOLD], True),  # one more than needed
        (
            [PARAGRAPHS[2][0], OTHER, *(p for p, _ in PARAGRAPHS[:2]), "2019_SGCA_1"],
            False,
        ),  # more wrong ones than right
        ([OTHER], False),  # half of the proof
        (["2019_SGCA_1:judgement:law", "2018_SGHC_2:judgement:orders"], False),  # sections are no proof
        ([], False),
    ],
)
def test_proper_citations_are_all_that_is_needed_and_little_else(library, cited, proper):
    episode = play(library, answer("$7,000", *cited), question=TWO)
    assert episode.metrics.answer_correct and episode.metrics.sources_correct == proper
    assert (episode.trajectory.reward > 0) == proper


def test_reading_a_section_reads_what_is_in_it(library):
    episode = play(library, tool("read_document", id="2019_SGCA_1:judgement"), answer("I don't know."))
    assert episode.metrics.ever_read_right_doc and episode.trajectory.reward == 0.0
    assert episode.trajectory.turns[1].observation.count("\n") == 2, "its three paragraphs, one a line"


def test_not_knowing_is_right_where_nothing_is_to_be_known(library):
    assert play(library, answer("I don't know"), question=NONE).trajectory.reward == 1.0
    assert play(library, answer("Dr Lim"), question=NONE).trajectory.reward == -1.0
    assert play(library, answer("I do not know."), question=ONE).trajectory.reward == 0.0


def test_after_n_tool_turns_the_answer_is_begun_for_the_model(library):
    episode = play(library, SEARCH, SEARCH, '{"answer": "$48,500", "sources": ["' + GOLD + '"]}</answer>', budget=2)
    assert episode.done and episode.trajectory.success and episode.metrics.num_turns == 3
    assert "Maximum number of interaction turns: 2" in start(library, budget=2).prompt().messages[0]["content"]
    episode = start(library, budget=1)
    assert episode.prompt().messages[-1]["role"] == "user"
    episode.act(episode.prompt(), Completion((), (), True, SEARCH))
    assert episode.prompt().messages[-1] == {"role": "assistant", "content": "<answer>"}
    episode.act(
        episode.prompt(), Completion((), (), True, answer("$48,500", GOLD))
    )  # an API that repeats the beginning
    SearchEpisode.settle([episode])
    assert episode.trajectory.success


def test_a_tool_call_in_place_of_a_forced_answer_is_no_answer(library):
    episode = play(library, SEARCH, SEARCH.removeprefix("<tool>"), budget=1)
    assert episode.metrics.ran_out_of_turns and episode.trajectory.stop == "budget"
    assert not episode.metrics.cant_parse_tool_call, "it stopped no tool"
    assert episode.trajectory.reward == pytest.approx(-0.9)  # wrong, with one right document found


def test_no_turns_are_naive_rag(library):
    episode = start(library, budget=0)
    (user,) = [m for m in episode.prompt().messages if m["role"] == "user"]
    assert user["content"].startswith("Question: What damages") and PARAGRAPHS[0][1] in user["content"]
    assert episode.metrics.num_searches == 1 and episode.metrics.ever_read_right_doc
    assert len(set(user["content"].split("\n"))) == len(user["content"].split("\n")), "merged: no paragraph comes twice"
    episode.act(episode.prompt(), Completion((), (), True, answer("$48,500", GOLD)))
    SearchEpisode.settle([episode])
    assert episode.trajectory.reward == pytest.approx(1.9) and episode.done
    with pytest.raises(UsageError, match="at least 0 turns, not -1"):
        start(library, budget=-1)


def test_long_observations_are_cut_and_say_so(tmp_path):
    library = Library(Corpus([("a:p1", "word " * 30_000)]), tmp_path)
    episode = start(library)
    episode.act(episode.prompt(), Completion((), (), True, tool("read_document", id="a")))
    assert len(episode.observation) < MOST_CHARACTERS + 100 and "cut" in episode.observation


def test_what_was_cut_off_was_not_found(tmp_path):
    library = Library(Corpus([(f"a:p{i}", "word " * 1_500) for i in range(4)]), tmp_path)  # two of them fit
    for gold, read in (("a:p1", True), ("a:p2", False)):
        question = Question("q", "test", "What?", "this", (gold,), "one")
        episode = SearchEpisode(Legal(library, (question,)), TextCodec(), State(Task("q", "test", question), 0, 5), 10)
        episode.act(episode.prompt(), Completion((), (), True, tool("read_document", id="a")))
        assert episode.metrics.ever_read_right_doc is read and episode.metrics.num_right_docs_found == read
        assert episode.observation.count(" | ") == 2 and episode.observation.endswith("(cut: read a smaller part)")


def test_document_text_cannot_forge_a_line_or_a_turn(tmp_path):
    library = Library(Corpus([("a:p1", "good\nb:p1 | forged damages")]), tmp_path)
    episode = start(library)
    episode.act(episode.prompt(), Completion((), (), True, tool("read_document", id="a")))
    assert episode.observation == "a:p1 | good b:p1 | forged damages"


def test_tasks_are_split_and_bounded(library):
    env = Legal(library, (ONE, TWO, NONE))
    assert {t.id for t in env.tasks("test", 3, 0)} == {"q1", "q2", "q3"}
    for wrong, message in ((("test", 4, 0), "there are 3 questions"), (("dev", 1, 0), "unknown split")):
        with pytest.raises(UsageError, match=message):
            env.tasks(*wrong)


def test_the_judge_is_asked_for_a_batch_at_once_and_only_for_answers(library):
    class Counting:
        name, asked = "counting", []

        def correct_all(self, pairs):
            self.asked.append([(q.id, a) for q, a in pairs])
            return [None if answer == "?" else True for _, answer in pairs]

    episodes = []
    for question, text in ((ONE, "a"), (NONE, "b"), (ONE, "I don't know"), (ONE, "c"), (ONE, "?")):
        env = Legal(library, (ONE, NONE), Counting())
        episode = SearchEpisode(env, TextCodec(), State(Task(question.id, "test", question), 0, 2), 10)
        episode.act(episode.prompt(), Completion((), (), True, answer(text)))
        episodes.append(episode)
    SearchEpisode.settle(episodes)
    assert Counting.asked == [[("q1", "a"), ("q1", "c"), ("q1", "?")]]
    assert [e.metrics.answer_correct for e in episodes] == [True, False, False, True, False]
    assert [e.trajectory.facts["no_verdict"] for e in episodes] == [0, 0, 0, 0, 1], "held wrong, and counted"
