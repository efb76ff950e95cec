"""A run can be killed at any moment: what resumes is bit for bit what an uninterrupted run would have been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import budgetmix
import gigpo
import grpo
import ppo
import runs
from envs import UsageError
from gigpo import AnchorCredit
from ppo import CriticCredit
from process_rewards import JudgeOptions

ROOT = Path(__file__).parent.parent
SMALL = {"steps": 4, "tasks_per_step": 2, "group_size": 4, "train_tasks": 20, "lora_rank": 4, "lora_alpha": 8}
ALGORITHMS = {
    "grpo": (grpo.Args, grpo.GroupCredit),
    "gigpo": (gigpo.Args, AnchorCredit),
    "ppo": (ppo.Args, CriticCredit),
}


def train(algorithm, base, folder, **changes):
    args_type, credit = ALGORITHMS[algorithm]
    args = args_type(**{"model": str(base), "env_args": ("max_turns=6",)} | SMALL | changes)
    return grpo.train(args, folder, credit_type=credit)


def metrics_of(folder):
    timing = ("rollout_s", "step_s", "turns_per_s")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in timing} for line in lines]


def assert_same(one, other):
    assert [m["step"] for m in metrics_of(one)] == list(range(1, len(metrics_of(one)) + 1))
    assert metrics_of(one) == metrics_of(other)
    assert (one / "trajectories.jsonl").read_text() == (other / "trajectories.jsonl").read_text()
    weights = "adapter/adapter_model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_that_was_logged_but_not_saved_is_done_again(algorithm, base, tmp_path, monkeypatch):
    straight = train(algorithm, base, tmp_path / "straight")
    saved = []

    def die(folder, *rest):
        saved.append(rest)
        if len(saved) == 3:  # the worst moment: the step is in the log, and half of the next line too
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 4, "succ')
            raise KeyboardInterrupt
        return runs.save_checkpoint(folder, *rest)

    monkeypatch.setattr(grpo, "save_checkpoint", die)
    with pytest.raises(KeyboardInterrupt):
        train(algorithm, base, tmp_path / "killed")
    monkeypatch.undo()
    assert_same(train(algorithm, base, tmp_path / "killed", resume=True), straight)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_process_killed_in_mid_step_resumes_to_the_same_numbers(algorithm, base, tmp_path):
    straight = train(algorithm, base, tmp_path / "straight", steps=8, out=tmp_path)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"steps": 8}).items()]
    command = [sys.executable, ROOT / f"{algorithm}.py", "--model", base, "--out", tmp_path, "--name", "killed",
               "--env-args", "max_turns=6", *flags]  # fmt: skip
    log = tmp_path / "killed" / "metrics.jsonl"
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 2):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it must have died in the middle"
    assert 2 <= log.read_text().count("\n") < 8
    done = subprocess.run([*map(str, command), "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "killed", straight)


@pytest.mark.parametrize("call", ["rmtree", "replace"])
def test_a_kill_between_the_adapter_and_the_state_is_repaired(call, base, tmp_path, monkeypatch):
    straight = train("grpo", base, tmp_path / "straight")
    seen = []

    def die(*rest, **options):
        if "adapter" in str(rest[0]) and "part" not in str(rest[-1]):
            seen.append(rest)
            if len(seen) == 4:  # in the last step: nothing is left to train afterwards but the checkpoint itself
                raise KeyboardInterrupt
        return plain(*rest, **options)

    module = runs.shutil if call == "rmtree" else runs.os
    plain = getattr(module, call)
    monkeypatch.setattr(module, call, die)
    with pytest.raises(KeyboardInterrupt):
        train("grpo", base, tmp_path / "killed")
    monkeypatch.undo()
    assert_same(train("grpo", base, tmp_path / "killed", resume=True), straight)


def test_a_run_is_never_continued_by_another_algorithm_or_with_other_budgets(base, tmp_path):
    folder = train("ppo", base, tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="credit was 'CriticCredit' and is now 'GroupCredit'"):
        train("grpo", base, folder, resume=True)
    folder = train("grpo", base, tmp_path / "other", steps=1)
    args = grpo.Args(**{"model": str(base), "env_args": ("max_turns=6",), "resume": True} | SMALL)
    with pytest.raises(UsageError, match="budgets was 'full_budget' and is now 'sample_budget'"):
        grpo.train(args, folder, budgetmix.sample_budget)


def test_patience_with_the_judge_may_change_on_resume_but_not_whom_one_asks(base, tmp_path):
    folder = train("grpo", base, tmp_path / "run", steps=1)
    train("grpo", base, folder, steps=1, resume=True, judge=JudgeOptions(timeout=5.0, retries=9, parallel=1))
    with pytest.raises(UsageError, match="judge was"):
        train("grpo", base, folder, steps=1, resume=True, judge=JudgeOptions(model="another"))


def test_a_run_folder_holds_what_it_promises(base, tmp_path):
    folder = train("grpo", base, tmp_path / "run", steps=1)
    assert json.loads((folder / "config.json").read_text())["env"] == "frozenlake"
    record = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    assert record["budget"] == 6 and record["turns"][0]["turns_left"] == 6 and record["turns"][0]["prompt_ids"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(plain, folder / "adapter")  # a standard export: PEFT loads it without our help
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.part"))


def test_more_steps_may_be_added_to_a_finished_run(base, tmp_path):
    train("grpo", base, tmp_path / "run", steps=2)
    longer = train("grpo", base, tmp_path / "run", steps=4, resume=True)
    assert_same(longer, train("grpo", base, tmp_path / "straight"))
    assert json.loads((longer / "config.json").read_text())["steps"] == 4


def test_resuming_refuses_what_does_not_fit(base, tmp_path):
    with pytest.raises(UsageError, match="there is no run in .* to resume"):
        train("grpo", base, tmp_path / "run", resume=True)
    folder = train("grpo", base, tmp_path / "run", steps=1)
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(UsageError, match="holds a run already"):
        train("grpo", base, folder)
    with pytest.raises(UsageError, match="lr was 2e-05 and is now 0.5"):
        train("grpo", base, folder, resume=True, lr=0.5)
    assert (folder / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "trajectories.jsonl", "state.pt"])
@pytest.mark.parametrize("damage", ["garbage\n", "[]", "{broken", "{}\n"])
def test_a_damaged_file_is_named_and_nothing_is_done(name, damage, base, tmp_path):
    folder = train("grpo", base, tmp_path / "run", steps=1)
    (folder / name).write_text(damage)
    kept = {p: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    if name.endswith("jsonl") and not damage.endswith("\n"):
        return  # a half-written last line is repaired, see above
    with pytest.raises(UsageError, match=name) as error:
        train("grpo", base, folder, steps=2, resume=True)
    assert "\n" not in str(error.value)
    assert {p: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "config.json"} == {
        p: raw for p, raw in kept.items() if p.name != "config.json"
    }


def test_an_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to the folder .*file/runs") as error:
        runs.make_folder(tmp_path / "file" / "runs")
    assert "\n" not in str(error.value)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    def fail(part):
        part.write_text("half of it")
        raise KeyboardInterrupt

    runs.write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        runs.replace_file(tmp_path / "x.json", fail)
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
