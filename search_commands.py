"""The commands of the search agent (search_agent.py): what they read from the command line, and what they do.

    demo              one question, turn by turn
    train             GRPO on the questions: LoRA, groups of 6, 8 groups a step
    evaluate          accuracy against turns (search_sweep.py)
    index             embed documents of your own, once
    make-questions    questions about them (envs/questions.py)

With a GPU, paper B's own setting is one command; Qwen3-14B reads 32,768 tokens and YaRN makes it 131,072:

    python search_agent.py train --model Qwen/Qwen3-14B --yarn 4 --max-tokens 2048 --steps 300 \\
        --corpus my/judgments --questions questions.jsonl --judge.model openai:gemini-2.5-pro

and `--model Qwen/Qwen3-0.6B` is the cheap stand-in with which to see whether everything runs.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Literal

import tyro
from rich.console import Console
from rich.text import Text

import grpo
from api import ChatAPI, Endpoint
from budgetmix import sample_budget
from chat import Completion, TextCodec
from envs import Task, UsageError
from envs.judgments import embedded
from envs.legal import Corpus, Library, Question
from envs.legal import index as index_documents
from envs.questions import QuestionOptions, load_questions, make_questions, read_seed_queries
from evaluate import TEST_SEED, Play, Policy, group_runs
from grpo import GroupCredit, full_budget, group_advantages
from judges import Judge, open_judge
from rollout import State, Trajectory, render_prompt
from runs import check_name, make_folder, read_config
from search_agent import Legal, SearchEpisode
from search_players import Habits, Searcher, disguise, imperfect, pieces, put_on
from search_sweep import parse_turns, report, sweep
from warmstart import Demonstration, ModelArgs, Recipe, ensure_base, extend_context

EMBEDDED_TOKENS = 64  # the longest response of the embedded model
LEAST_STD = 0.25  # of the rewards of a group, see `BandCredit`


# ---- what all commands know ----


@dataclass
class AnswerJudge(Endpoint):
    """Who says whether an answer is right."""

    model: str = "exact"
    """exact: rules for values, offline (judges.py); or openai:MODEL, which says True or False (paper: Gemini 2.5 Pro)."""
    history: tyro.conf.Suppress[int] = 0


@dataclass
class SearchGame(ModelArgs):
    """The documents, the questions, and the model that answers them."""

    env: tyro.conf.Suppress[str] = "legal"
    env_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    observation: tyro.conf.Suppress[str] = "text"
    history: tyro.conf.Suppress[int] = 1000  # an agent that searches has to remember what it found
    corpus: Path | None = None
    """Folder or file with documents of your own (XML, JSONL, Markdown, text); by default the embedded judgments."""
    questions: Path | None = None
    """Questions about them, as make-questions writes them."""
    max_turns: int = 10
    """Tool turns, after which the model has to answer."""
    judge: AnswerJudge = field(default_factory=AnswerJudge)
    yarn: float = 1.0
    """How many times its own context the model shall read, by YaRN: 4 makes Qwen3's 32,768 tokens 131,072."""

    EPISODE: ClassVar = SearchEpisode
    TOLD: ClassVar = ("env", "history", "thinking", "max_tokens", "corpus", "questions", "judge_name")
    RECIPE: ClassVar = Recipe(episodes=9000, steps=7000, batch_size=16, layers=3, heads=4, buckets=32, threads=2)
    MINUTES: ClassVar = 15

    def __post_init__(self):
        if self.max_tokens is None:
            self.max_tokens = EMBEDDED_TOKENS if self.model == "embedded" else 4096 if self.thinking else 1024
        if self.sample_batch is None:
            self.sample_batch = 256
        super().__post_init__()

    @property
    def judge_name(self) -> str:
        return self.judge.model

    def check(self) -> None:
        super().check()
        self.judge.check("judge")
        if not 0 <= self.max_turns <= 1000:
            raise UsageError(f"max_turns must be between 0 and 1000, not {self.max_turns}")
        if not 1 <= self.yarn <= 16 or (self.yarn > 1 and self.model == "embedded"):
            raise UsageError(f"yarn must be from 1 to 16, and 1 for the embedded model, not {self.yarn}")
        if self.corpus is not None and self.model == "embedded":
            raise UsageError("the embedded model knows the embedded judgments only: for --corpus name a --model")
        if self.corpus is None and self.questions is not None:
            raise UsageError("--questions are about documents of your own: name them with --corpus")

    def library(self) -> Library:
        return open_library(self.corpus, self.out)

    def new_env(self) -> Legal:
        return Legal(self.library(), self._questions(), open_answer_judge(self.judge, self.out), self.max_turns)

    def _questions(self) -> tuple[Question, ...]:
        if self.corpus is None:
            return embedded()[1]
        if self.questions is None:
            raise UsageError("documents of your own need --questions: make some with search_agent.py make-questions")
        return open_questions(self.questions, self.corpus, self.out)

    # ---- the embedded base ----

    def base(self) -> str | Path:
        """One base for all: that a training is restricted to 2 turns does not change what it starts from."""
        if self.model != "embedded":
            return extend_context(super().base(), self.yarn, self.out) if self.yarn > 1 else super().base()
        seed = self.seed if self.base_seed is None else self.base_seed
        return ensure_base(SearchGame(seed=seed, out=self.out))

    def demonstrations(self, episodes: int) -> list[Demonstration]:
        """Imperfect players answer training questions at budgets from 0 to max_turns, in disguise (search_players.py).

        Where one answers from the paragraph that it has just read, four exercises are added: the question, the paragraph and
        the answer alone, each time in another disguise. In these short prompts a tiny model learns in 500 steps to copy a
        value, which the long ones did not teach it in 6,000."""
        rng, env = Random(f"searchers {self.seed}"), self.new_env()
        tasks = env.tasks("train", split_size(self, "train"), self.seed)
        found = []
        for _ in range(episodes):
            episode = SearchEpisode(env, TextCodec(), State(rng.choice(tasks), 0, rng.randint(0, env.max_turns)), 1000)
            player, swapped = Searcher(env, rng, imperfect(rng)), disguise(rng, env.library.corpus.documents)
            while not episode.done:
                prompt, response = episode.prompt(), player(episode.forced)
                messages = [m | {"content": put_on(m["content"], swapped)} for m in prompt.messages]
                found.append((messages, put_on(response, swapped)))
                if is_exercise(episode, response):
                    told = [prompt.messages[1], *prompt.messages[-1 - episode.forced :]]
                    for _ in range(4):
                        other = disguise(rng, env.library.corpus.documents)
                        short = [m | {"content": put_on(m["content"], other)} for m in told]
                        found.append((short, put_on(response, other)))
                episode.act(prompt, Completion((), (), True, response))
        return found

    def piece(self) -> str:
        return pieces(render_prompt(self.new_env(), 0, 0, [], "")[0]["content"])


def is_exercise(episode: SearchEpisode, response: str) -> bool:
    """Whether a response is the answer from one paragraph that was read just before."""
    env = episode.env
    return '"answer"' in response and env.question.kind == "one" and bool(env.log) and env.log[-1][0] == "read_document"


def split_size(game: SearchGame, split: str) -> int:
    return sum(q.split == split for q in game.new_env().questions)


@cache
def open_library(corpus: Path | None, out: Path) -> Library:
    make_folder(out)
    return index_documents(corpus, out) if corpus else Library(embedded()[0], out)


@cache
def open_questions(questions: Path, corpus: Path, out: Path) -> tuple[Question, ...]:
    return load_questions(questions, open_library(corpus, out).corpus)


_JUDGES: dict[tuple, Judge] = {}


def open_answer_judge(options: AnswerJudge, out: Path) -> Judge:
    """One judge for all episodes: behind an endpoint it has a connection and a file of verdicts."""
    key = options.model, options.base_url, out
    if key not in _JUDGES:
        _JUDGES[key] = open_judge(options.model, options, out)
    return _JUDGES[key]


# ---- train ----


class BandCredit(GroupCredit):
    """Group-relative advantages that do not blow a group of failures up: where all were wrong and differ by a tenth of a
    point, a standard deviation of 0.05 would make that tenth an advantage of 2. The floor keeps it below a half."""

    def turn_advantages(self, group: list[Trajectory]) -> list[list[float]]:
        advantages = group_advantages([t.reward for t in group], min_std=LEAST_STD)
        return [[a] * len(t.turns) for a, t in zip(advantages, group, strict=True)]


@dataclass
class Train(SearchGame, grpo.Args):
    """GRPO with banded rewards (paper B): group size 6, 8 groups a step, LoRA."""

    budgetmix: bool = False
    """Draw the turn budget of each group from 10 to 100 % of max_turns (paper A's idea on paper B's task)."""
    group_size: int = 6
    """Trajectories per question (paper: 6)."""
    steps: int = 200
    """Training steps, each a batch of groups and an update (paper: 300)."""
    train_tasks: int | None = None
    """Size of the pool of training questions that each step draws from, by default all of them."""
    process_reward: tyro.conf.Suppress[str] = "none"
    process_weight: tyro.conf.Suppress[float] = 1.0
    probe: tyro.conf.Suppress[int] = 0

    def __post_init__(self):
        super().__post_init__()
        if not self.name:
            short = f"-{self.max_turns}turns" if self.max_turns != 10 else ""
            self.name = f"search{short}{'-budgetmix' if self.budgetmix else ''}{f'-s{self.seed}' if self.seed else ''}"

    def check(self) -> None:
        super().check()
        if self.train_tasks is None:
            self.train_tasks = split_size(self, "train")
        if self.budgetmix and not self.max_turns:
            raise UsageError("budgetmix draws from 1 to max_turns, which is 0: leave one of them out")


def train(args: Train) -> None:
    folder = grpo.train(args, args.out / args.name, sample_budget if args.budgetmix else full_budget, BandCredit)
    print(f"everything lies in {folder}/; measure it with: python search_agent.py evaluate base {folder} --turns 0-10")


# ---- demo ----


@dataclass
class Demo(SearchGame):
    """Answer one question, and show every turn."""

    policy: Annotated[str, tyro.conf.Positional] = "base"
    """base, a trained run such as runs/search, or expert, the scripted one."""
    question: int = 0
    """Which of the test questions."""


def read_search_config(run: Path) -> dict:
    """The config of a run of this agent. Raises UsageError for any other folder."""
    config = read_config(run)
    if config["env"] != "legal":
        raise UsageError(f"{run} was trained on {config['env']}, not by search_agent.py")
    return config


def as_trained(args: SearchGame, configs: dict[Path, dict]) -> SearchGame:
    """The arguments with the documents and the model of trained runs. Raises UsageError for runs that differ in them."""
    first, *others = configs
    for name in (own := ("model", "thinking", "max_tokens", "yarn", "corpus", "questions")):
        for path in others:
            if configs[path][name] != configs[first][name]:
                raise UsageError(f"{path} was trained with another {name} than {first}: compare like with like")
    settings = {name: configs[first][name] for name in own}
    return replace(args, **settings | {k: Path(settings[k]) for k in ("corpus", "questions") if settings[k]})


COLOURS = {"think": "italic #777777", "tool": "#0072B2", "answer": "bold #009E73"}


def demo(args: Demo) -> None:
    run = None if args.policy in ("base", "expert") else Path(args.policy)
    config = read_search_config(run) if run else None
    args = as_trained(args, {run: config}) if run else args
    args.check()
    env, console = args.new_env(), Console(highlight=False)
    tasks = env.tasks("test", split_size(args, "test"), TEST_SEED)
    if not 0 <= args.question < len(tasks):
        raise UsageError(f"question must be between 0 and {len(tasks) - 1}, not {args.question}")
    task = tasks[args.question]
    policy = Expert() if args.policy == "expert" else Policy(config["base"] if config else args.base(), run)
    (t,) = policy.open_play(args)([(task, 0, args.max_turns)], args.seed)
    if not t.turns:
        raise UsageError("the question does not fit into the model's context: lower --max-tokens")
    for i, turn in enumerate(t.turns, 1):
        console.print(Text(f"\n--- turn {i}, {turn.turns_left} tool turns left", style="bold"))
        console.print(Text(turn.observation))
        console.print(coloured(turn.response if turn.turns_left else "<answer>" + turn.response))
    right: Question = task.data
    console.print(
        Text(f"\nright answer: {right.answer}   from: {', '.join(right.sources) or 'no document'}", style="bold")
    )
    met = [f"{name} {value:.0f}" for name, value in t.facts.items() if value]
    console.print(Text(f"reward {t.reward:.2f} by the {env.judge.name} judge   ({', '.join(met)})", style="bold"))


def coloured(response: str) -> Text:
    """A response with its parts in colours. Never read as markup: it is a model's text."""
    text = Text(response)
    for tag, style in COLOURS.items():
        text.highlight_regex(rf"(?s)<{tag}>.*?(</{tag}>|$)", style)
    return text


class Expert:
    """The scripted expert where a trained model could stand."""

    name, base, run = "expert", "expert", None

    def open_play(self, args: SearchGame, how: dict[str, float] | None = None) -> Play:
        """Plays games, given as (task, episode seed, budget). It draws nothing, so the sampling says nothing to it."""
        return lambda games, seed: self._play(args, games)

    def _play(self, args: SearchGame, games: list[tuple[Task, int, int]]) -> list[Trajectory]:
        episodes = [SearchEpisode(args.new_env(), TextCodec(), State(*game), args.history) for game in games]
        for episode in episodes:
            player = Searcher(episode.env, Random(0), Habits())
            while not episode.done:
                episode.act(episode.prompt(), Completion((), (), True, player(episode.forced)))
        SearchEpisode.settle(episodes)
        return [episode.trajectory for episode in episodes]


# ---- evaluate ----


@dataclass
class Evaluate(SearchGame):
    """Accuracy on held-out questions against the number of tool turns. Models: base, run folders, expert, openai:MODEL."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ("base",)
    """base, trained runs, expert (the scripted one), or openai:MODEL."""
    turns: str = "0-10"
    """Numbers of tool turns, for example 0-10 or 0,2,5,10; 0 is naive RAG."""
    n: int = 2
    """Answers per question and number of turns."""
    temperature: float = 1.0
    """Sampling temperature. Paper B names none; 1.0 is that of training."""
    eval_tasks: int | None = None
    """Questions, by default all of the split."""
    split: Literal["test", "val"] = "test"
    """test for reporting, val for choosing settings."""
    name: str = "search-evaluation"
    """Folder inside `out` for tables and pictures."""

    def __post_init__(self):
        behind = [m for m in self.models if m.startswith("openai:")]
        if self.model == "embedded" and behind and set(self.models) <= {*behind, "expert"}:
            self.model = behind[0]  # nothing here is the embedded model, with its short answers
        super().__post_init__()

    def check(self) -> None:
        super().check()
        parse_turns(self.turns)
        check_name(self.name, self.out)
        if self.n < 1 or (self.eval_tasks is not None and self.eval_tasks < 1):
            raise UsageError("n and eval_tasks must be at least 1")
        if not self.temperature > 0:
            raise UsageError(f"temperature must be above 0, not {self.temperature}")
        self.new_env().tasks(self.split, self.eval_tasks or 1, TEST_SEED)

    @property
    def sampling(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_p": 1.0}


def evaluate(args: Evaluate) -> None:
    if len(set(args.models)) < len(args.models) or not args.models:
        raise UsageError("name each model once: " + " ".join(args.models))
    paths = [Path(m) for m in args.models if m not in ("base", "expert") and not m.startswith("openai:")]
    configs = {path: read_search_config(path) for path in paths}
    args = as_trained(args, configs) if paths else args
    args.check()
    if args.eval_tasks is None:
        args = replace(args, eval_tasks=split_size(args, args.split))
    trained = group_runs(paths, how_trained)
    bases = sorted({config["base"] for config in configs.values()})
    groups: dict[str, list[tuple[Policy | Expert, Evaluate]]] = {}
    for model in args.models:
        if model == "expert":
            groups[model] = [(Expert(), args)]
        elif model == "base":
            groups[model] = [(Policy(base), args) for base in bases or [args.base()]]
        elif model.startswith("openai:"):
            # The embedded model's answers are short, and a limit for it is none for a model that may think.
            own = None if args.model == "embedded" and args.max_tokens == EMBEDDED_TOKENS else args.max_tokens
            groups[model] = [(Policy(model), replace(args, model=model, max_tokens=own))]
        else:
            label = next(name for name, runs in trained.items() if any(run == Path(model) for _, run in runs))
            groups[label] = [(Policy(config["base"], run), args) for config, run in trained[label]]
    runs = {label: [run for _, run in of_label] for label, of_label in trained.items()}
    text = report(sweep(groups, args), args, runs, next(iter(groups)))
    print(f"\n{text}\neverything lies in {args.out / args.name}/")


def how_trained(config: dict) -> str:
    """A run's label (evaluate.group_runs)."""
    turns = f", {config['max_turns']} turns" if config["max_turns"] != 10 else ""
    return f"RL{turns}{' + BudgetMix' if config['budgetmix'] else ''}"


# ---- documents and questions of your own ----


@dataclass
class Index:
    """Read documents, embed them, and keep what was embedded: later commands with --corpus start at once."""

    path: Annotated[Path, tyro.conf.Positional]
    """Folder or file."""
    out: Path = Path("runs")
    """Folder in which base models, runs and embeddings are kept."""


def index(args: Index) -> None:
    library = open_library(args.path, args.out)
    _ = library.faiss
    documents = len(library.corpus.documents)
    print(f"{len(library.corpus):,} paragraphs in {documents:,} documents; embeddings lie in {library.embed.file}")


@dataclass
class MakeQuestions(QuestionOptions):
    """Questions about documents of your own, in three stages: patterns, candidates, filters (paper B)."""

    path: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder or file with the documents."""
    seed_queries: Path | None = None
    """A file with queries of people who know, one a line."""
    llm: str = ""
    """openai:MODEL, the model that writes and judges the questions."""
    endpoint: Endpoint = field(default_factory=Endpoint)
    name: str = "questions"
    """Folder inside `out` for the output of each stage."""
    out: Path = Path("runs")
    """Folder in which everything is kept."""


def questions(args: MakeQuestions) -> None:
    if not args.llm.startswith("openai:") or args.llm == "openai:":
        raise UsageError(f"--llm must be openai:MODEL, not {args.llm!r}")
    if args.seed_queries is None or args.path is None:
        raise UsageError("make-questions needs documents and --seed-queries FILE")
    args.endpoint.check("endpoint")
    args.check()
    check_name(args.name, args.out)
    seeds, corpus = read_seed_queries(args.seed_queries), Corpus.load(args.path)
    chat = ChatAPI(args.llm.removeprefix("openai:"), args.endpoint, make_folder(args.out) / "answers.sqlite")
    chosen = QuestionOptions(**{f.name: getattr(args, f.name) for f in fields(QuestionOptions)})
    print(f"questions: {make_questions(corpus, seeds, chat, args.out / args.name, chosen)}")


MAIN = {Demo: demo, Train: train, Evaluate: evaluate, Index: index, MakeQuestions: questions}

Args = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Index, tyro.conf.subcommand("index")]
    | Annotated[MakeQuestions, tyro.conf.subcommand("make-questions")]
)


def main(args) -> None:
    MAIN[type(args)](args)
