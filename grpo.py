"""GRPO for multi-turn agents: compare the trajectories of a group, and make the turns of the better ones more likely.

For one task play G trajectories with the current policy. Trajectory i earns one reward R_i. Its advantage is how much
better it did than its group, and every response token of every one of its turns carries that advantage:

    A_i = (R_i - mean(R)) / (std(R) + eps)                                                paper A, Algorithm 1, line 10
    loss = 1/N * sum over the N response tokens of the batch of
               - min(rho * A_i, clip(rho, 1 - 0.2, 1 + 0.2) * A_i)  +  0.001 * k3          paper A, A.2
    rho = pi(token) / pi_old(token)        k3 = exp(d) - d - 1,  d = log pi_ref(token) - log pi(token)

There is no critic and no process reward: the group is the baseline. Only response tokens enter: prompts and
observations are given, not chosen. This file is also the training loop of the whole project: BudgetMix changes the
budgets it is given, and nothing else.

    python grpo.py --env frozenlake        is full-budget GRPO: every group plays with T_max turns

What was left out on purpose: several optimiser steps per batch, dropping of groups without signal, length-dependent
loss weights.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from envs import Task, UsageError
from rollout import (
    HFEngine,
    Sampling,
    Trajectory,
    Turn,
    add_adapter,
    load_model,
    make_folder,
    play,
    response_logprobs,
    right_aligned,
    run_cli,
    write_json,
)
from warmstart import ModelArgs

# ---- the maths ----


def group_advantages(rewards: list[float], min_std: float = 0.0, eps: float = 1e-6) -> list[float]:
    """Group-relative advantages: one reward in, one advantage out, per *trajectory* (paper A, Algorithm 1).

    Statistics over trajectories and not over turns: otherwise a long trajectory would weigh more in its group's mean
    than a short one. `min_std` is a floor for the standard deviation (the unbiased one), for rewards in bands, where a
    group of near-equal failures must not be blown up to full-size advantages.
    """
    if max(rewards) == min(rewards):
        # Exactly zero, decided on the rewards themselves: the float mean of six times 0.35 is not 0.35, and the residue
        # divided by an equally tiny std would be an advantage of order one.
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (max(std, min_std) + eps) for r in rewards]


def k3_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy, any shape (verl's low_var_kl).

    With d = log pi_ref - log pi the plain estimate -d is unbiased but often negative; k3 = exp(d) - d - 1 has the same
    mean and is never negative. It grows with distance in either direction, so *adding* it to the loss punishes
    distance. The clamps keep one very surprising token from dominating the batch; where they bind the gradient is zero.
    """
    d = (ref_logp - logp).clamp(-20.0, 20.0)
    return (d.exp() - d - 1.0).clamp(-10.0, 10.0)


def clipped_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """Per-token clipped surrogate loss, the shape of its arguments (PPO's, used by GRPO; `clip` is 0.2 on both sides in
    A.2).

    The minimum is pessimistic: it stops rewarding a change once the ratio has left [1 - clip, 1 + clip] in the
    direction that the advantage asks for, and never stops correcting one that went the wrong way.
    """
    ratio = (logp - old_logp).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)


def turn_advantages(group: list[Trajectory]) -> list[list[float]]:
    """GRPO's credit for one group: one float per turn per trajectory, and all turns of a trajectory share its advantage."""
    advantages = group_advantages([t.reward for t in group])
    return [[a] * len(t.turns) for a, t in zip(advantages, group, strict=True)]


def full_budget(t_max: int, rng: Random) -> int:
    """Standard multi-turn RL: every group plays with the whole budget. BudgetMix replaces this one function."""
    return t_max


# ---- the arguments ----


@dataclass
class Args(ModelArgs):
    """Full-budget GRPO on an environment. Defaults that differ from paper A (A.2) name the paper's value."""

    name: str = ""
    """Name of the run's folder inside `out`; by default made from the environment and the algorithm."""
    resume: bool = False
    """Continue the run of this name where it stopped."""

    steps: int = 60
    """Training steps; one step is one batch of groups and one update."""
    tasks_per_step: int = 8
    """Tasks (groups) per step (the paper does not give its batch size)."""
    group_size: int = 16
    """Trajectories per task, the paper's G."""
    train_tasks: int = 1000
    """Size of the pool of training tasks that each step draws from."""

    lr: float = 1.5e-3
    """Learning rate of AdamW (paper: 1e-6, for full weights of 4 to 8 billion; a tiny adapter needs far more)."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    kl_coef: float = 0.001
    """Weight of the k3 KL towards the base model."""
    clip: float = 0.2
    """Clip range of the probability ratio."""
    grad_clip: float = 1.0
    """Largest norm of the gradient (the paper does not name one)."""
    lora_rank: int = 8
    """Rank of the LoRA adapter on all linear layers (the paper does not say how it trains its weights)."""
    lora_alpha: int = 16
    """Scale of the LoRA adapter: its output is multiplied by alpha / rank."""
    micro_batch: int = 64
    """Distinct (prompt, response) sequences per forward pass. Changes speed and memory, never the gradient."""
    save_every: int = 1
    """Steps between two checkpoints."""


def check(args: Args) -> None:
    """Refuse settings that cannot train, before anything is written. Raises UsageError."""
    for name in ("steps", "tasks_per_step", "train_tasks", "max_tokens", "micro_batch", "save_every", "lora_rank"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name} must be at least 1, not {getattr(args, name)}")
    if args.group_size < 2:
        raise UsageError(f"group_size must be at least 2, not {args.group_size}: trajectories are compared in groups")
    for name in ("lr", "clip", "grad_clip"):
        if not getattr(args, name) > 0:
            raise UsageError(f"{name} must be above 0, not {getattr(args, name)}")
    if args.history < 0 or args.kl_coef < 0:
        raise UsageError("history and kl_coef must not be negative")


# ---- one update ----


def update(policy, optimizer, turns: list[Turn], advantages: list[float], pad: int, args: Args) -> dict[str, float]:
    """One optimiser step on a batch of turns with one advantage each. Returns the diagnostics that tell whether
    learning is healthy.

    Equal (prompt, response) pairs are common, because members of a group meet the same states. Each distinct pair goes
    through the model once, and its log-probs are *indexed* by all the turns that share it: autograd then sums their
    gradients, which is the same number as computing them one by one, for any advantages and any loss. That is also why
    micro-batches are made of distinct pairs, and why their losses are sums divided by one number of tokens for the
    whole batch: a mean per micro-batch would give tokens in a short micro-batch more weight.
    """
    owners: dict[tuple, list[int]] = {}
    for i, turn in enumerate(turns):
        owners.setdefault((turn.prompt_ids, turn.response_ids), []).append(i)
    distinct = sorted(owners, key=lambda pair: len(pair[0]) + len(pair[1]))  # like lengths together: little padding
    total_tokens = sum(len(t.response_ids) for t in turns)
    sums = dict.fromkeys(("loss", "kl", "clip_fraction", "mismatch"), 0.0)
    batches = [distinct[i : i + args.micro_batch] for i in range(0, len(distinct), args.micro_batch)]
    # The reference is the base model: the same weights with the adapter off.
    with torch.no_grad(), policy.disable_adapter():
        references = [response_logprobs(policy, pairs, pad) for pairs in batches]
    optimizer.zero_grad()
    for pairs, reference in zip(batches, references, strict=True):
        members = [i for pair in pairs for i in owners[pair]]  # the turns [M] that these pairs [U] stand for
        rows = torch.tensor([row for row, pair in enumerate(pairs) for _ in owners[pair]], device=policy.device)
        logp = response_logprobs(policy, pairs, pad)[rows]  # [U, R] -> [M, R]
        ref_logp = reference[rows]
        old_logp, mask = right_aligned([turns[i].logprobs for i in members], policy.device)
        advantage = torch.tensor([advantages[i] for i in members], device=policy.device)[:, None].expand_as(mask)
        # Columns outside the mask hold log-probs of prompt tokens: zeroed, so that no 0 * infinity can arise.
        logp, ref_logp, old_logp = logp * mask, ref_logp * mask, old_logp * mask
        kl = k3_kl(logp, ref_logp)
        per_token = clipped_loss(logp, old_logp, advantage, args.clip) + args.kl_coef * kl
        loss = (per_token * mask).sum() / total_tokens
        loss.backward()
        ratio = (logp - old_logp).exp().detach()
        sums["loss"] += loss.item()
        sums["kl"] += (kl.detach() * mask).sum().item() / total_tokens
        sums["clip_fraction"] += (((ratio - 1).abs() > args.clip) * mask).sum().item() / total_tokens
        # With one update per batch the sampler and the trainer must agree: anything above float noise is a bug.
        sums["mismatch"] += ((logp - old_logp).detach().abs() * mask).sum().item() / total_tokens
    norm = torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], args.grad_clip)
    if not torch.isfinite(norm):
        raise UsageError(
            "the gradient is not finite: the step is not taken; lower --lr, or --resume the last checkpoint"
        )
    optimizer.step()
    return sums | {"grad_norm": norm.item(), "distinct_share": len(distinct) / len(turns)}


# ---- the loop ----


def train(args: Args, folder: Path, sample_budget: Callable[[int, Random], int] = full_budget) -> Path:
    """Train into a run folder (config.json, metrics.jsonl, trajectories.jsonl, adapter/) and return it.

    What happens in a step depends on (seed, step) alone, so a resumed run repeats exactly what an uninterrupted one
    would do.
    """
    check(args)
    tasks = args.new_env().tasks("train", args.train_tasks, args.seed)
    base = args.base()
    model, tokenizer = load_model(base)
    policy = add_adapter(model, args.lora_rank, args.lora_alpha, args.seed)
    engine = HFEngine(policy, tokenizer)
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=args.weight_decay)
    done = open_run(folder, args, str(base), policy, optimizer)

    successes: list[float] = []
    bar = tqdm(range(done, args.steps), initial=done, total=args.steps, desc=folder.name, unit="step")
    for step in bar:
        started = time.perf_counter()
        groups = play_groups(args, engine, tasks, sample_budget, step)
        played = time.perf_counter()
        trajectories = [t for group in groups for t in group]
        turns = [turn for t in trajectories for turn in t.turns]
        if not turns:
            raise UsageError(f"no prompt fits into this model's context of {engine.context} tokens: lower --history")
        advantages = [a for group in groups for per_trajectory in turn_advantages(group) for a in per_trajectory]
        health = update(policy, optimizer, turns, advantages, engine.pad, args)
        seconds = time.perf_counter() - started
        metrics = {"step": step + 1, **summarise(groups), **health, "rollout_s": played - started, "step_s": seconds}
        metrics["turns_per_s"] = len(turns) / seconds
        # One trajectory per group is enough to see what the policy does; all of them would be 16 times as much disk.
        log(folder, metrics, [{"step": step + 1, **group[0].record()} for group in groups])
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_checkpoint(folder, policy, optimizer, step + 1)
        successes.append(metrics["success"])
        bar.set_postfix(
            success=f"{sum(successes[-5:]) / len(successes[-5:]):.0%}",
            budget=f"{metrics['budget']:.0f}",
            kl=f"{metrics['kl']:.3f}",
            turns_per_s=f"{metrics['turns_per_s']:.0f}",
        )
    return folder


def play_groups(
    args: Args, engine: HFEngine, tasks: list[Task], sample_budget: Callable[[int, Random], int], step: int
) -> list[list[Trajectory]]:
    """The batch of one step: `tasks_per_step` groups of `group_size` trajectories; one task and one budget per group.

    Tasks, budgets and episode seeds come from three separate generators: another distribution of budgets changes no
    task.
    """
    t_max = args.new_env().max_turns
    chosen = Random(f"tasks {args.seed} {step}").sample(tasks, min(args.tasks_per_step, len(tasks)))
    budget_rng, episode_rng = Random(f"budgets {args.seed} {step}"), Random(f"episodes {args.seed} {step}")
    games = []
    for task in chosen:
        budget = sample_budget(t_max, budget_rng)
        games += [(task, episode_rng.randrange(2**31), budget) for _ in range(args.group_size)]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=args.max_tokens)  # paper A, A.2
    played = play(engine, args.new_env, games, sampling, seed=args.seed * 1_000_003 + step, history=args.history)
    return [played[i : i + args.group_size] for i in range(0, len(played), args.group_size)]


def summarise(groups: list[list[Trajectory]]) -> dict[str, float]:
    """What a batch of groups looked like."""
    trajectories = [t for group in groups for t in group]
    turns = [turn for t in trajectories for turn in t.turns]
    tokens = sum(len(turn.logprobs) for turn in turns)
    return {
        "success": sum(t.success for t in trajectories) / len(trajectories),
        "reward": sum(t.reward for t in trajectories) / len(trajectories),
        "budget": sum(t.budget for t in trajectories) / len(trajectories),
        "turns": len(turns) / len(trajectories),
        "out_of_budget": sum(t.stop == "budget" for t in trajectories) / len(trajectories),
        "invalid": sum(not turn.valid for turn in turns) / len(turns),
        # Minus the mean log-prob of what was sampled estimates the entropy per token: at zero exploration is over.
        "entropy": -sum(sum(turn.logprobs) for turn in turns) / tokens,
        # The share of groups whose rewards differ. The others teach nothing.
        "groups_with_signal": sum(len({t.reward for t in group}) > 1 for group in groups) / len(groups),
    }


# ---- files: a run can be killed at any moment and continued ----

_FREE_ON_RESUME = {"resume", "out", "name", "steps", "save_every", "micro_batch"}  # may differ from the stored run


def open_run(folder: Path, args: Args, base: str, policy, optimizer) -> int:
    """Start a run folder, or with `--resume` load its last checkpoint into policy and optimiser. Returns the steps
    done.

    Raises UsageError when the folder cannot be written, holds a run already, or was made with other settings.
    """
    config = {**{k: str(v) if isinstance(v, Path) else v for k, v in asdict(args).items()}, "base": base}
    config["env_args"] = list(args.env_args)
    stored = folder / "config.json"
    if not args.resume:
        if stored.exists():
            raise UsageError(f"{folder} holds a run already: continue it with --resume, or choose another --name")
        make_folder(folder)
        write_json(stored, config)
        return 0
    if not stored.exists():
        raise UsageError(f"there is no run in {folder} to resume")
    before = json.loads(stored.read_text())
    changed = [k for k in config if k not in _FREE_ON_RESUME and k in before and before[k] != config[k]]
    if changed:
        differences = ", ".join(f"{k} was {before[k]!r} and is now {config[k]!r}" for k in changed)
        raise UsageError(f"cannot resume {folder} with other settings: {differences}")
    step = 0
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt", map_location=policy.device, weights_only=True)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(state["adapter"][name])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    # The kill may have come after a step was logged and before it was saved: forget what will be done again.
    for log_file in ("metrics.jsonl", "trajectories.jsonl"):
        if (folder / log_file).exists():
            lines = (folder / log_file).read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            _replace(folder / log_file, lambda part, whole=whole: part.write_text("".join(whole)))
    return step


def save_checkpoint(folder: Path, policy, optimizer, step: int) -> None:
    """state.pt holds all that resuming needs, replaced at once; adapter/ is the standard PEFT export beside it."""
    weights = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    state = {"step": step, "adapter": weights, "optimizer": optimizer.state_dict()}
    _replace(folder / "state.pt", lambda part: torch.save(state, part))
    new = folder / "adapter.part"
    shutil.rmtree(new, ignore_errors=True)
    policy.save_pretrained(new)
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    os.replace(new, folder / "adapter")


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def log(folder: Path, metrics: dict, records: list[dict]) -> None:
    """Append one step to metrics.jsonl and trajectories.jsonl."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    with open(folder / "trajectories.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def main(args: Args) -> None:
    folder = args.out / (args.name or f"{args.env}-grpo-s{args.seed}")
    train(args, folder)
    print(f"everything lies in {folder}/; measure it with: python evaluate.py base {folder} --env {args.env}")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
