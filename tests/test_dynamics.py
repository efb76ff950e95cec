"""The probe during training: it changes nothing, survives kills, and its curves are averages with intervals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import dynamics
import envs
import grpo
from dynamics import read_probes
from engine import HFEngine
from envs import UsageError


def train(base, folder, **changes):
    settings = {"steps": 4, "tasks_per_step": 2, "group_size": 4, "train_tasks": 20, "lora_rank": 4, "lora_alpha": 8,
                "env_args": ("max_turns=6",), "out": folder.parent}  # fmt: skip
    return grpo.train(grpo.Args(model=str(base), **settings | changes), folder)


def probes_of(run):
    return [json.loads(line) for line in (run / "probe.jsonl").read_text().splitlines()]


def test_a_probe_changes_nothing_in_the_training_and_its_pool_is_shared(base, tmp_path):
    plain, probed = train(base, tmp_path / "plain"), train(base, tmp_path / "probed", probe=2)
    weights = "adapter/adapter_model.safetensors"
    assert (plain / weights).read_bytes() == (probed / weights).read_bytes()
    assert not (plain / "probe.jsonl").exists()
    rows = probes_of(probed)
    assert [row["step"] for row in rows] == [0, 2, 4]
    (pool,) = tmp_path.glob("probe-frozenlake-*.json")
    states, before = json.loads(pool.read_text()), pool.stat().st_mtime_ns
    assert len(states) == sum(t["states"] for t in rows[0]["by_task"].values())
    held_out = {t.id for t in envs.make("frozenlake").tasks("val", 64, 0)}
    assert {s["task"] for s in states} <= held_out and len({s["spent"] for s in states}) == 6
    # The means are what the parts by task say, and a second run asks the very same states.
    for row in rows:
        tasks = row["by_task"].values()
        assert row["r_single"] == pytest.approx(sum(t["single"] for t in tasks) / len(states))
        assert row["r_multi"] == pytest.approx(sum(t["multi"] for t in tasks) / len(tasks))
    other = train(base, tmp_path / "other", probe=2, lr=0.1)
    assert probes_of(other)[0] == rows[0] and probes_of(other)[2] != rows[2], "at step 0 both are the base"
    assert pool.stat().st_mtime_ns == before


measure = dynamics.Probe.measure


def die_after_step_2(probe, step):
    result = measure(probe, step)
    if step == 2:  # written, but its step is not saved yet
        raise KeyboardInterrupt
    return result


def die_in_the_very_first(probe, step):
    probe.log.write_text('{"step": 0, "r_si')
    raise KeyboardInterrupt


@pytest.mark.parametrize("die", [die_after_step_2, die_in_the_very_first])
def test_a_killed_run_resumes_to_the_same_probes(die, base, tmp_path, monkeypatch):
    straight = train(base, tmp_path / "straight", probe=2)
    monkeypatch.setattr(dynamics.Probe, "measure", die)
    with pytest.raises(KeyboardInterrupt):
        train(base, tmp_path / "killed", probe=2)
    monkeypatch.undo()
    train(base, tmp_path / "killed", probe=2, resume=True)
    assert probes_of(tmp_path / "killed") == probes_of(straight)


def test_a_probe_cannot_be_switched_on_later(base, tmp_path):
    train(base, tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="began without --probe"):
        train(base, tmp_path / "run", probe=2, resume=True)
    train(base, tmp_path / "run", resume=True)


def test_curves_average_runs_and_their_changes_have_intervals(base, tmp_path):
    runs = [train(base, tmp_path / f"s{s}", probe=2, seed=s, lr=0.05) for s in (0, 1)]
    curves, rows = read_probes(runs), [probes_of(run) for run in runs]
    for name, key in (("multi", "r_multi"), ("single", "r_single")):
        for i, (mean, low, high) in enumerate(curves.cells(name)):
            assert mean == pytest.approx((rows[0][i][key] + rows[1][i][key]) / 2) and low <= mean <= high
        assert curves.cells(name, since=0)[0] == (0.0, 0.0, 0.0)
        change = np.mean([own[2][key] - own[0][key] for own in rows])
        assert curves.cells(name, since=0)[2][0] == pytest.approx(change)
    unprobed = train(base, tmp_path / "unprobed")
    with pytest.raises(UsageError, match="was trained without probes: train it with --probe"):
        read_probes([unprobed])
    with pytest.raises(UsageError, match="other steps"):
        read_probes([runs[0], train(base, tmp_path / "odd", probe=3)])
    for damage in ("{", "", '{"step": 0, "by_task": {"a": {"single": 1}}}\n'):
        (runs[0] / "probe.jsonl").write_text(damage)
        with pytest.raises(UsageError, match="is damaged"):
            read_probes(runs)


def test_probes_need_exact_values_and_a_whole_pool(base, tmp_path):
    with pytest.raises(UsageError, match="leave out --probe"):
        train(base, tmp_path / "run", probe=2, env="frozenlake-fog")
    assert not (tmp_path / "run").exists()
    train(base, tmp_path / "good", probe=4)
    (pool,) = tmp_path.glob("probe-*.json")
    for number, damage in enumerate(('[{"task": "gone"}]', "[]", "{}")):
        pool.write_text(damage)
        with pytest.raises(UsageError, match="is no pool of states: remove it"):
            train(base, tmp_path / f"bad{number}", probe=4)


def test_another_model_or_game_has_another_pool(base, tmp_path, engine):
    def file(folder=base, **changes):
        args = grpo.Args(**{"model": str(folder), "env_args": ("max_turns=6",), "out": tmp_path} | changes)
        return dynamics.Probe(args, folder, engine, tmp_path).file

    first = file()
    assert file() == first and len({first, file(env_args=("max_turns=7",)), file(max_tokens=9), file(history=1)}) == 4
    changed = Path(shutil.copytree(base, tmp_path / base.name))
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    assert file(changed) != first


def test_pools_and_probes_are_sampled_like_every_evaluation(base, tmp_path, engine, monkeypatch):
    asked, generate = [], HFEngine.generate
    monkeypatch.setattr(
        HFEngine, "generate", lambda e, p, sampling, s: asked.append(sampling) or generate(e, p, sampling, s)
    )
    dynamics.Probe(grpo.Args(model=str(base), env_args=("max_turns=2",), out=tmp_path), base, engine, tmp_path).measure(
        0
    )
    assert {(s.temperature, s.top_p) for s in asked} == {(0.6, 0.9)}


def test_the_base_of_a_probe_is_the_model_without_the_adapter(policy, base, tmp_path):
    # Resuming a run whose pool is gone: the pool must come from the base, though the policy has moved on.
    from engine import HFEngine

    args = grpo.Args(model=str(base), env_args=("max_turns=6",), out=tmp_path)
    model, tokenizer = policy
    fresh = dynamics.Probe(args, base, HFEngine(model, tokenizer), tmp_path).pool
    for path in tmp_path.glob("probe-*.json"):
        path.unlink()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.5 * ("lora_B" in name))
    assert dynamics.Probe(args, base, HFEngine(model, tokenizer), tmp_path).pool == fresh
