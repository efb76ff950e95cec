"""The legal search agent of paper B: search over several turns, read, cite, and say "I don't know" rather than invent.

    question -> <tool>search</tool> -> ids and snippets -> <tool>read</tool> -> text -> ... -> <answer>text, sources</answer>

Three ideas are worth the reader's time here.

1. *Four bands of reward.* Where almost every trajectory fails, right-or-wrong says nothing. So a reward has a band for how
   an episode ended, and a place inside the band for how well it was done; no reward leaves its band:

       [ 1,  2]  right, with proper citations:   1 + e,  e = 1 - (turns + searches) / 20, each counted up to 10
       [ 0,  1]  "I don't know":                 1 where no document answers, else 0
       [-1,  0]  wrong:                          -1 + 0.1 * (right documents found), at most 0
       [-2, -1]  a format error, and no answer:  -1 - (kinds of format error) / 3

   An error that the agent recovered from costs a tenth of its place inside the band. A right answer without proper
   citations counts as wrong: a lawyer cannot use what she cannot check, and a guess must not pay. Running out of turns
   without an answer counts as wrong too: silence is no honesty, else waiting would pay better than searching in vain.
   Where a document does answer, "I don't know" is worth nothing: an attempt then pays from three right in eight on.

2. *Turn restriction.* A budget of N is N tool turns. When they are spent, the next message is begun for the model with
   <answer>: synthetic tokens, which end its prompt and so carry no loss. With N = 0 the question alone is searched for and
   answered from what was found: that is naive RAG, the baseline.

3. *Verifiable metrics.* Of 13 metrics 12 are counted by this file; only whether an answer is right needs a judge
   (judges.py). GRPO then trains a LoRA adapter on the rewards (grpo.py), with groups of 6 and 8 groups a step.

    python search_agent.py demo                                   one question, turn by turn
    python search_agent.py train [--max-turns 2] [--budgetmix]
    python search_agent.py evaluate base runs/search --turns 0-10
    python search_agent.py index my/documents
    python search_agent.py make-questions my/documents --seed-queries q.txt --llm openai:MODEL
"""

import json
import re
from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from itertools import accumulate
from random import Random
from typing import Any

from chat import Completion, Prompt, after_thinking
from envs import SPLITS, Env, Step, Task, UsageError
from envs.legal import Hit, Library, Paragraph, Question
from judges import ExactJudge, Judge
from rollout import Episode, State, Turn, render_prompt

# ---- the metrics and the reward ----


@dataclass
class Metrics:
    """The 13 metrics of paper B for one trajectory, and `num_right_docs_found` for the partial credit. All but the first
    are verifiable without a judge. The documents that count are the gold paragraphs of the question."""

    # how it ended
    answer_correct: bool = False  # by the judge; for a question that no document answers: "I don't know" was said
    sources_correct: bool = False  # all gold paragraphs are cited, and among the rest not more than as many others
    returned_i_dont_know: bool = False
    attempted_answer: bool = False  # an answer that is not "I don't know"
    # how far it came
    ever_found_right_doc: bool = False  # a gold paragraph was among the results of a search, or was read
    ever_read_right_doc: bool = False
    # format errors
    cant_parse_tool_call: bool = False  # a response that is neither one tool call nor one answer
    bad_tool_call_name: bool = False
    bad_tool_call_args: bool = False
    bad_sources_id: bool = False  # a citation of what does not exist
    # effort
    num_turns: int = 0  # responses of the model; of these `num_searches` were searches
    num_searches: int = 0
    ran_out_of_turns: bool = False  # there were no turns left, and still no answer
    # for the partial credit
    num_right_docs_found: int = 0


STOPPED_A_TOOL = ("cant_parse_tool_call", "bad_tool_call_name", "bad_tool_call_args")


def banded_reward(m: Metrics) -> float:
    """The reward of a trajectory in [-2, 2] (paper B, reward bands; the head of this file)."""
    errors = sum(getattr(m, name) for name in STOPPED_A_TOOL)
    recovered = 1 - 0.1 * errors
    if m.returned_i_dont_know:
        return m.answer_correct * recovered
    if m.attempted_answer and m.answer_correct and m.sources_correct:
        effort = (min(m.num_turns, 10) + min(m.num_searches, 10)) / 20
        return 1.0 + (1.0 - effort) * recovered
    if errors and not m.attempted_answer:
        return -1.0 - errors / len(STOPPED_A_TOOL)
    return -1.0 + min(1.0, 0.1 * m.num_right_docs_found) * recovered


# ---- reading a response ----

TOOLS = {"keyword_search": ("query", "k"), "semantic_search": ("query", "k"), "read_document": ("id",)}
MOST_HITS, DEFAULT_HITS = 50, 5
LONGEST_QUERY = 1000  # characters


@dataclass(frozen=True)
class Response:
    """A response understood: one tool call with its arguments, or one answer with its sources, or neither, with the
    `problem` that is told to the model. `flags` are the metrics that it sets."""

    tool: str | None = None
    arguments: tuple[Any, ...] = ()  # (query, k) of a search, (id,) of a reading
    answer: str | None = None
    sources: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    problem: str = ""


UNREADABLE = (
    'write one <tool>{"name": ..., "arguments": {...}}</tool> or one <answer>...</answer>, and nothing after it'
)


def parse_response(text: str, opened: bool = False) -> Response:
    """Read a response strictly: thinking is skipped (`opened` says that the prompt has begun it), free text may come first,
    then stands exactly one tool call or one answer, and nothing follows.

    The JSON of a tool call is read by a JSON decoder from where it begins, so that a tag inside a string is a string.
    Nothing is guessed at, and no input raises.
    """
    start = after_thinking(text, opened)
    body = "" if start is None else text[start:]
    tag = re.search(r"<(tool|answer)>", body)
    if tag is None:
        return _unreadable("there is no <tool> and no <answer>")
    inside = body[tag.end() :]
    return _read_tool(inside) if tag[1] == "tool" else _read_answer(inside)


def _unreadable(why: str) -> Response:
    return Response(flags=("cant_parse_tool_call",), problem=f"{why}: {UNREADABLE}")


def _read_tool(inside: str) -> Response:
    try:
        call, end = read_json(inside)
    except ValueError as error:
        return _unreadable(f"what follows <tool> is not JSON ({error})")
    rest = inside[end:].lstrip()
    if not rest.startswith("</tool>"):
        return _unreadable("the JSON is not followed by </tool>")
    if rest.removeprefix("</tool>").strip():
        return _unreadable("there is more after </tool>")
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return _unreadable('a tool call has "name" and "arguments"')
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or name not in TOOLS:
        return Response(
            flags=("bad_tool_call_name",), problem=f"there is no such tool: choose one of {', '.join(TOOLS)}"
        )
    problem, values = check_arguments(name, arguments)
    if problem:
        return Response(flags=("bad_tool_call_args",), problem=f"{name}: {problem}")
    return Response(tool=name, arguments=values)


def check_arguments(tool: str, arguments: Any) -> tuple[str, tuple[Any, ...]]:
    """(what is wrong with the arguments of a tool call or "", their values in order)."""
    wanted = TOOLS[tool]
    if not isinstance(arguments, dict):
        return f"arguments must be an object with {', '.join(wanted)}", ()
    if unknown := set(arguments) - set(wanted):
        return f"no argument {sorted(unknown)[0][:40]!r}, there are {', '.join(wanted)}", ()
    text = arguments.get(wanted[0])
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_QUERY:
        return f"{wanted[0]} must be a text of 1 to {LONGEST_QUERY} characters", ()
    k = arguments.get("k", DEFAULT_HITS)
    if type(k) is not int or not 1 <= k <= MOST_HITS:  # True is an int to isinstance
        return f"k must be a whole number from 1 to {MOST_HITS}", ()
    return "", (text.strip(), k) if "k" in wanted else (text.strip(),)


def _read_answer(inside: str) -> Response:
    """A JSON object with answer and sources; plain text is an answer without sources."""
    content, closed, rest = inside.rpartition("</answer>")
    if not closed:
        return _unreadable("</answer> is missing")
    if rest.strip():
        return _unreadable("there is more after </answer>")
    sources: Any = []
    if content.lstrip().startswith("{"):  # meant as JSON, while "[2019] SGCA 4" and "14 March 2019" are plain text
        try:
            value, end = read_json(content)
        except ValueError:
            return _unreadable("what stands in <answer> is not JSON")
        if content[end:].strip():
            return _unreadable("there is more than one thing in <answer>")
        value, sources = value.get("answer"), value.get("sources", [])
        content = value if isinstance(value, str) else json.dumps(value) if type(value) in (int, float) else ""
    if re.search(r"</?(tool|answer)>", content):
        return _unreadable("there are tags inside of <answer>")
    if not content.strip():
        return _unreadable("the answer is empty")
    listed = isinstance(sources, list)
    cited = tuple(dict.fromkeys(s for s in sources if isinstance(s, str))) if listed else ()
    flags = () if listed and all(isinstance(s, str) for s in sources) else ("bad_sources_id",)
    return Response(answer=content.strip(), sources=cited, flags=flags)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)


def _no_number(name: str):
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


def read_json(text: str) -> tuple[Any, int]:
    """(the JSON value that a text begins with, where it ends). Raises ValueError for anything else, a key that comes twice
    and nesting without end included."""
    start = len(text) - len(text.lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_i_dont_know(answer: str) -> bool:
    """Whether an answer says that it does not know, and nothing else: "I don't know, but perhaps $500" is an answer."""
    plain = answer.replace("’", "'").strip(" .!\n").casefold()
    return plain in ("i don't know", "i do not know", "i don't know the answer", "i do not know the answer")


# ---- the environment ----

INSTRUCTION = """\
Answer a legal question from a body of documents that you can search. One turn is one tool call; when no turn is left you \
have to answer. The tools:
keyword_search(query, k): the k paragraphs that match the words of the query best, by BM25, with ids and snippets.
semantic_search(query, k): the k paragraphs that are nearest in meaning.
read_document(id): a paragraph in full. Ids are hierarchical: cut parts off the end to read the section or document.
Cite the ids of all paragraphs that prove the answer, and no others. If the documents do not answer the question, or you \
have not found it, answer: I don't know."""
ACTION_FORMAT = """\
<tool>{"name": "keyword_search", "arguments": {"query": "...", "k": 5}}</tool> or
<tool>{"name": "read_document", "arguments": {"id": "..."}}</tool> or, to end,
<answer>{"answer": "...", "sources": ["id", "id"]}</answer>
You may think first, in <think>...</think>."""
MOST_CHARACTERS = 20_000  # of one observation
RAG_HITS = 5  # of each of the two searches of naive RAG


class Legal(Env):
    """Questions to a library. An action is a tool call that parse_response has read, given to `call`."""

    name, instruction, action_format = "legal search", INSTRUCTION, ACTION_FORMAT

    def __init__(
        self, library: Library, questions: tuple[Question, ...], judge: Judge | None = None, max_turns: int = 10
    ):
        self.library, self.questions, self.max_turns = library, questions, max_turns
        self.judge = judge or ExactJudge()

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        if split not in SPLITS:
            raise UsageError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        own = [q for q in self.questions if q.split == split]
        if n > len(own):
            raise UsageError(f"there are {len(own)} questions to {split} with, not {n}: ask for fewer tasks")
        return [Task(q.id, split, q) for q in Random(f"legal {split} {seed}").sample(own, n)]

    def reset(self, task: Task, seed: int) -> str:
        self.question: Question = task.data
        self.log: list[tuple[str, tuple[Any, ...], list]] = []  # tool, arguments, what it returned
        return f"Question: {self.question.text}"

    def step(self, action: str) -> Step:
        response = parse_response(action)
        observation, flags = self.call(response) if response.tool else (response.problem, response.flags)
        return Step(observation, 0.0, False, False, not flags)

    def state(self) -> Hashable:
        return self.question.id, tuple((tool, arguments) for tool, arguments, _ in self.log)

    def call(self, response: Response) -> tuple[str, tuple[str, ...]]:
        """Run a tool call. Returns (observation, flags)."""
        tool, arguments = response.tool, response.arguments
        if tool == "read_document":
            try:
                found = self.library.read_document(*arguments)
            except KeyError:
                return "read_document: there is no such id. The turn is spent.", ("bad_tool_call_args",)
        else:
            found = getattr(self.library, tool)(*arguments)
        text, shown = show(found)
        self.log.append((tool, arguments, shown))
        return text, ()

    def retrieve(self) -> str:
        """What naive RAG is shown: the paragraphs that one keyword and one semantic search for the question itself find,
        in turns from both lists."""
        question = self.question.text
        lists = self.library.keyword_search(question, RAG_HITS), self.library.semantic_search(question, RAG_HITS)
        ids = dict.fromkeys(hits[i].id for i in range(RAG_HITS) for hits in lists if i < len(hits))
        text, shown = show([(id, self.library.corpus.texts[id]) for id in ids])
        self.log.append(("retrieve", (question,), shown))
        return f"Question: {question}\n{text}"

    def seen(self) -> tuple[set[str], set[str]]:
        """(ids of the paragraphs that were found so far, ids of those that were read in full)."""
        read = {id for tool, _, found in self.log if not tool.endswith("search") for id, _ in found}
        return read | {hit.id for tool, _, hits in self.log if tool.endswith("search") for hit in hits}, read


def show(found: list[Hit] | list[Paragraph]) -> tuple[str, list]:
    """(search results or paragraphs as text, one a line; those of them that fit in whole, at least the beginning of one)."""
    pairs = [(f.id, f.snippet) if isinstance(f, Hit) else f for f in found]
    lines = [f"{id} | {' '.join(said.split())}" for id, said in pairs]
    ends = list(accumulate(len(line) + 1 for line in lines))
    fit = max(1, bisect_right(ends, MOST_CHARACTERS))
    text = "\n".join(lines[:fit]) or "Nothing was found."
    if lines and ends[-1] > MOST_CHARACTERS:
        text = text[:MOST_CHARACTERS] + "\n(cut: read a smaller part)"
    return text, found[:fit]


# ---- the episode ----

BEGUN = "<answer>"  # with which a forced answer is begun for the model


class SearchEpisode(Episode):
    """One question. `budget` is N, the tool turns: at most N + 1 responses, the last of them begun with <answer>."""

    least_budget = 0
    env: Legal

    def __init__(self, env: Legal, codec, start: State, history: int = 0):
        super().__init__(env, codec, start, history)
        self.metrics = Metrics()
        self.answer: str | None = None
        self.no_verdict = False  # the judge could not say, and the answer was held wrong
        if start.budget == 0:
            self.observation = env.retrieve()
            self.metrics.num_searches = 1
            self._look()

    @property
    def forced(self) -> bool:
        return self.turns_left == 0

    def prompt(self) -> Prompt:
        t = self.trajectory
        messages = render_prompt(self.env, t.budget, self.spent, self.recent, self.observation)
        return self.codec.encode(messages, begun=BEGUN if self.forced else "")

    def act(self, prompt: Prompt, completion: Completion) -> None:
        text = self.codec.read(completion).text
        m, before, state = self.metrics, self.observation, self.env.state()
        m.num_turns += 1
        said = BEGUN + text.lstrip().removeprefix(BEGUN) if self.forced else text  # an API may repeat the beginning
        response = parse_response(said, self.codec.opened and not self.forced)
        if not completion.finished:
            response = _unreadable("the response was cut off by the length limit")
        flags = response.flags
        if response.answer is not None:
            self._answer(response)
        elif self.forced:
            flags, m.ran_out_of_turns = (), True  # an unreadable answer stopped no tool
        elif response.tool:
            m.num_searches += response.tool.endswith("search")
            self.observation, flags = self.env.call(response)
            self._look()
        else:
            self.observation = f"Invalid response: {response.problem}. The turn is spent."
        for flag in flags:
            setattr(m, flag, True)
        turn = Turn(prompt.ids, completion.ids, completion.logprobs, before, text, None, None,
                    not response.flags and not flags, 0.0, state, self.turns_left, not completion.finished)  # fmt: skip
        self.trajectory.turns.append(turn)
        self.recent = [*self.recent, (before, said)][-self.history :] if self.history else []
        if response.answer is not None or self.forced:
            self.end("success" if response.answer is not None else "budget")
        self.spent += 1

    def _look(self) -> None:
        """Count what of the gold paragraphs has been seen."""
        found, read = self.env.seen()
        gold, m = set(self.env.question.sources), self.metrics
        m.num_right_docs_found = len(gold & found)
        m.ever_found_right_doc, m.ever_read_right_doc = bool(gold & found), bool(gold & read)

    def _answer(self, response: Response) -> None:
        m, gold, cited = self.metrics, set(self.env.question.sources), set(response.sources)
        self.answer = response.answer
        m.returned_i_dont_know = is_i_dont_know(response.answer)
        m.attempted_answer = not m.returned_i_dont_know
        m.bad_sources_id = bool(response.flags) or any(id not in self.env.library.corpus for id in cited)
        m.sources_correct = bool(gold) and gold <= cited and len(cited - gold) <= len(gold) and not m.bad_sources_id

    @classmethod
    def settle(cls, episodes: list["SearchEpisode"]) -> None:
        """Have all answers of a batch judged together (a judge behind an endpoint is asked side by side), and give each
        trajectory its reward: on its last turn, since nothing is known before."""
        answered = [e for e in episodes if e.metrics.attempted_answer and e.env.question.sources]
        if answered:
            verdicts = answered[0].env.judge.correct_all([(e.env.question, e.answer) for e in answered])
            for episode, verdict in zip(answered, verdicts, strict=True):
                episode.metrics.answer_correct, episode.no_verdict = verdict is True, verdict is None
        for episode in episodes:
            m, t = episode.metrics, episode.trajectory
            m.answer_correct |= m.returned_i_dont_know and not episode.env.question.sources
            t.success, t.reward = m.answer_correct, banded_reward(m)
            t.stop = (
                "context"
                if t.stop == "context"
                else "budget"
                if episode.answer is None
                else "success"
                if t.success
                else "failure"
            )
            t.facts = {name: float(value) for name, value in asdict(m).items()} | {
                "no_verdict": float(episode.no_verdict)
            }
            if t.turns:
                t.turns[-1].reward = t.reward


if __name__ == "__main__":
    from rollout import run_cli
    from search_commands import Args, main  # which import this file: so the commands stand in one of their own

    run_cli(Args, main, __doc__)
