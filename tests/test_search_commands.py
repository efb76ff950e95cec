"""The search agent's commands as they are typed, on a small body of judgments and a model that has hardly learnt."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import search_commands
from chat import Sampling
from engine import HFEngine, Sample, load_model, response_logprobs
from envs import UsageError
from envs.judgments import embedded
from rollout import play
from search_agent import SearchEpisode
from search_commands import Demo, Evaluate, SearchGame, Train, as_trained
from warmstart import Recipe, extend_context

ROOT = Path(__file__).parent.parent
SMALL = ("--steps", "2", "--group-size", "2", "--tasks-per-step", "2", "--train-tasks", "4", "--max-turns", "2")


@pytest.fixture(scope="module", autouse=True)
def small():
    """A tenth of the judgments, and a base after few steps: what is tested here is not how well it searches."""
    patch = pytest.MonkeyPatch()
    patch.setattr(search_commands, "embedded", partial(embedded, judgments=20))
    patch.setattr(SearchGame, "RECIPE", Recipe(episodes=60, steps=40, batch_size=8, lr=1e-2, hidden=32, buckets=2))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A folder that has the base and the embeddings already."""
    folder = tmp_path_factory.mktemp("runs")
    SearchGame(out=folder).base()
    return folder


@pytest.fixture
def search(command, out):
    return lambda *words: command(search_commands, *words, "--out", out)


@pytest.fixture(scope="module")
def trained(out) -> Path:
    search_commands.train(Train(steps=2, group_size=2, tasks_per_step=2, train_tasks=4, max_turns=2, name="t", out=out))
    return out / "t"


def test_training_writes_a_run_with_all_metrics(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"answer_correct", "ever_found_right_doc", "num_searches", "num_right_docs_found"} <= set(rows[0])
    assert all(0 <= row["ever_found_right_doc"] <= 1 and row["num_turns"] <= 3 for row in rows)
    assert all(row["mismatch"] < 1e-4 for row in rows), "sampler and trainer agree, forced answers included"
    config = json.loads((trained / "config.json").read_text())
    assert config["judge"]["model"] == "exact" and config["max_turns"] == 2 and config["credit"] == "BandCredit"
    record = json.loads((trained / "trajectories.jsonl").read_text().splitlines()[0])
    assert {"answer_correct", "bad_sources_id"} <= set(record)


def test_a_resumed_training_is_the_uninterrupted_one(search, trained, out):
    words = ("train", *SMALL, "--name", "halves")
    assert search(*words, "--steps", "1") == 0 and search(*words, "--resume") == 0
    left, right = (
        [
            {k: v for k, v in json.loads(line).items() if not k.endswith(("_s", "per_s"))}
            for line in (out / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("t", "halves")
    )
    assert left == right


def test_forced_answers_carry_no_loss_on_what_was_begun(out):
    game = SearchGame(out=out, max_turns=1)
    model, tokenizer = load_model(game.base())
    engine = HFEngine(model, tokenizer)
    tasks = game.new_env().tasks("train", 4, 0)
    games = [(task, 0, n) for task in tasks for n in (0, 1)]
    trajectories = play(engine, game.new_env, games, Sampling(max_tokens=24), 0, 99, SearchEpisode)
    begun = tuple(tokenizer.encode("<answer>", add_special_tokens=False))
    forced = [turn for t in trajectories for turn in t.turns if turn.turns_left == 0]
    assert forced and all(turn.prompt_ids[-len(begun) :] == begun for turn in forced)
    for turn in forced[:3]:  # and the log-probs are those of the response after that beginning
        logp = response_logprobs(model, [Sample(turn.prompt_ids, turn.response_ids)], engine.pad)[0]
        assert torch.allclose(logp, torch.tensor(turn.logprobs), atol=1e-4)
    free = [turn for t in trajectories for turn in t.turns if turn.turns_left]
    assert free and not any(turn.prompt_ids[-len(begun) :] == begun for turn in free)


def test_evaluate_sweeps_and_says_who_judged(search, trained, out, capsys):
    words = ("evaluate", "base", trained, "expert", "--turns", "0,2", "--n", "1", "--eval-tasks", "6")
    assert search(*words) == 0
    said = capsys.readouterr().out
    assert "RL, 2 turns" in said and "naive RAG: base" in said and "judged by exact" in said
    result = json.loads((out / "search-evaluation" / "sweep.json").read_text())
    assert (
        result["judge"] == "exact"
        and result["turns"] == [0, 2]
        and set(result["accuracy"]) == {"base", "RL, 2 turns", "expert"}
    )
    assert {"num_searches", "ran_out_of_turns"} <= set(result["metrics"]["expert"][0])
    for picture in ("turns.png", "found.png"):
        assert (out / "search-evaluation" / picture).stat().st_size > 10_000
    kept = {f: f.read_bytes() for f in (out / "samples").iterdir()}
    assert search(*words) == 0 and {f: f.read_bytes() for f in (out / "samples").iterdir()} == kept, "nothing anew"
    assert search(*words[:-4], "--n", "1", "--eval-tasks", "8") == 0
    more = {f: f.read_bytes() for f in (out / "samples").iterdir()}
    assert set(more) == set(kept) and all(len(more[f]) > len(kept[f]) for f in kept), "only what is missing"


def test_a_model_behind_an_endpoint_plays_the_same_loop(search, server, capsys):
    def behave(n, body):
        if body["messages"][-1]["role"] == "assistant":
            assert body["messages"][-1]["content"] == "<answer>"
            return 200, '{"answer": "I don\'t know", "sources": []}</answer>'
        return 200, '<tool>{"name": "keyword_search", "arguments": {"query": "damages"}}</tool>'

    server.behave = behave
    words = (
        "evaluate",
        "openai:m",
        "--endpoint.base-url",
        server.url,
        "--turns",
        "0,1",
        "--n",
        "1",
        "--eval-tasks",
        "4",
    )
    assert search(*words, "--name", "api") == 0
    assert "openai:m" in capsys.readouterr().out and len(server.requests) == 4 + 8
    assert Evaluate(models=("openai:m", "expert")).max_tokens == 1024 and Evaluate(models=("base",)).max_tokens == 64
    assert search(*words, "--name", "api") == 0 and len(server.requests) == 12, "no answer is paid for twice"
    # Beside the embedded model, whose answers end after 64 tokens, it plays as it does alone: nothing is asked anew.
    assert search("evaluate", "base", *words[1:], "--name", "both") == 0 and len(server.requests) == 12
    assert search(*words, "--max-tokens", "99", "--name", "api") == 0 and len(server.requests) == 24
    assert server.requests[-1][1]["max_tokens"] == 99


def test_an_llm_judges_the_answers_and_is_named(search, trained, server, out):
    server.behave = lambda n, body: (200, "True")
    words = ("evaluate", "expert", "--turns", "10", "--n", "1", "--eval-tasks", "5", "--name", "judged")
    assert search(*words, "--judge.model", "openai:gem", "--judge.base-url", server.url) == 0
    assert json.loads((out / "judged" / "sweep.json").read_text())["judge"] == "openai:gem"
    assert 0 < len(server.requests) <= 5


def test_demo_prints_every_turn_and_the_right_answer(search, capsys):
    assert search("demo", "expert") == 0
    said = capsys.readouterr().out
    assert (
        "turn 1, 10 tool turns left" in said and "<tool>" in said and "right answer" in said and "exact judge" in said
    )
    assert search("demo", "--question", "1") == 0  # the base itself


def test_demo_of_a_run_has_its_model_and_documents(search, trained, out):
    config = json.loads((trained / "config.json").read_text())
    shown = as_trained(Demo(out=out), {trained: config | {"corpus": "docs", "max_tokens": 7}})
    assert (shown.model, shown.corpus, shown.max_tokens) == ("embedded", Path("docs"), 7)
    with pytest.raises(UsageError, match="other was trained with another max_tokens than"):
        as_trained(Demo(out=out), {trained: config, Path("other"): config | {"max_tokens": 7}})
    assert search("demo", trained) == 0


def test_by_default_all_questions_are_asked(out):
    args = Train(out=out)
    args.check()
    asked = search_commands.embedded()[1]
    assert args.train_tasks == sum(q.split == "train" for q in asked)


def test_runs_that_differ_in_more_than_the_seed_are_told_apart(search, trained, out, capsys):
    for name, change in (("t-s1", {"seed": 1}), ("t-lr", {"lr": 9.0})):
        shutil.copytree(trained, out / name)
        config = json.loads((out / name / "config.json").read_text())
        (out / name / "config.json").write_text(json.dumps(config | change))
    words = (out / "t-s1", out / "t-lr", "--turns", "0", "--n", "1", "--eval-tasks", "2", "--name", "apart")
    assert search("evaluate", trained, *words) == 0
    bases = json.loads((out / "apart" / "sweep.json").read_text())["bases"]
    assert {label: len(own) for label, own in bases.items()} == {"t t-s1": 2, "t-lr": 1}
    assert search("evaluate", trained, f"{trained}/", "--turns", "0") == 2
    assert "named twice" in capsys.readouterr().err


def test_index_reads_documents_and_embeds_each_once(command, tmp_path, capsys):
    (tmp_path / "law.md").write_text("# Parties\n\nLim owes Tan $5.\n\n# Orders\n\nPay it.\n")
    assert command(search_commands, "index", tmp_path / "law.md", "--out", tmp_path / "runs") == 0
    assert "2 paragraphs in 1 documents" in capsys.readouterr().out
    assert (tmp_path / "runs" / "embeddings.sqlite").exists()


def test_questions_of_ones_own_are_made_and_searched(command, tmp_path, server, base, capsys):
    """From documents to an evaluated agent, with one endpoint for everything."""
    documents = tmp_path / "docs.jsonl"
    documents.write_text(
        "".join(json.dumps({"id": f"d{i}:p1", "text": f"Party {i} owes ${i}00."}) + "\n" for i in range(8))
    )
    line = {"id": "q", "split": "test", "question": "What does party 3 owe?", "answer": "$300", "sources": ["d3:p1"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(line) + "\n")
    server.behave = lambda n, body: (200, '{"answer": "$300", "sources": ["d3:p1"]}</answer>')
    words = ("--corpus", documents, "--questions", tmp_path / "q.jsonl", "--out", tmp_path, "--eval-tasks", "1")
    words += ("--endpoint.base-url", server.url, "--turns", "0", "--n", "1")
    assert command(search_commands, "evaluate", "openai:m", *words) == 0
    assert "| openai:m | 100.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (("train", "--max-turns", "-1"), "max_turns must be between 0 and 1000"),
        (("train", "--group-size", "1"), "group_size must be at least 2"),
        (("train", "--budgetmix", "--max-turns", "0"), "budgetmix draws from 1"),
        (("train", "--train-tasks", "100000"), "there are"),
        (("train", "--judge.model", "gpt"), "gpt"),
        (("train", "--judge.base-url", "ftp://x"), "base-url must be like"),
        (("train", "--questions", "q.jsonl"), "name them with --corpus"),
        (("train", "--corpus", "nowhere"), "for --corpus name a --model"),
        (("train", "--corpus", "nowhere", "--model", "smollm2"), "nowhere"),
        (("train", "--yarn", "4"), "yarn must be from 1 to 16"),
        (("train", "--name", "../x"), "must stay inside"),
        (("evaluate", "base", "--turns", "ten"), "turns must be numbers"),
        (("evaluate", "base", "--eval-tasks", "100000"), "there are"),
        (("evaluate", "base", "--n", "0"), "at least 1"),
        (("evaluate", "base", "--temperature", "0"), "temperature must be above 0"),
        (("evaluate", "nowhere"), "nowhere is not a trained run"),
        (("evaluate", "base", "base"), "name each model once"),
        (("demo", "--question", "100000"), "question must be between"),
        (("demo", "nowhere"), "nowhere is not a trained run"),
        (("index", "nowhere"), "nowhere"),
        (("make-questions", "docs", "--llm", "gpt"), "must be openai:MODEL"),
        (("make-questions", "docs", "--llm", "openai:m"), "needs documents and --seed-queries"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(search, words, message, capsys, out):
    before = sorted(out.iterdir())
    assert search(*words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert sorted(out.iterdir()) == before, "nothing half-written"


def test_a_longer_context_by_yarn(out, tmp_path):
    base = SearchGame(out=out).base()
    folder = extend_context(base, 4, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.max_position_embeddings == 4 * 4096
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["original_max_position_embeddings"] == 4096
    assert extend_context(base, 4, tmp_path) == folder, "made once"
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_killed_at_any_moment_and_run_again(search, out, tmp_path):
    """A real process, killed in the middle of training: the resumed run's numbers are the uninterrupted one's."""
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from functools import partial\nimport search_commands\nfrom envs.judgments import embedded\n"
        "from warmstart import Recipe\n"
        "search_commands.embedded = partial(embedded, judgments=20)\n"
        "search_commands.SearchGame.RECIPE = Recipe(episodes=60, steps=40, batch_size=8, lr=1e-2, hidden=32, buckets=2)\n"
        "from rollout import run_cli\nrun_cli(search_commands.Args, search_commands.main, '')\n"
    )
    for folder in out.iterdir():
        if folder.name.startswith("base-"):
            shutil.copytree(folder, tmp_path / folder.name)
    shutil.copy(out / "embeddings.sqlite", tmp_path)
    words = ["train", *SMALL, "--steps", "6", "--out", str(tmp_path), "--name"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    assert search("train", *SMALL, "--steps", "6", "--name", "whole") == 0
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words, "killed"], env=environment, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "killed" / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(
        [sys.executable, "-c", script, *words, "killed", "--resume"], check=True, env=environment, capture_output=True
    )
    whole, killed = (
        [
            {k: v for k, v in json.loads(line).items() if not k.endswith(("_s", "per_s"))}
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in (out / "whole", tmp_path / "killed")
    )
    assert whole == killed and len(whole) == 6
