"""GRPO for multi-turn agents: compare the trajectories of a group, and make the turns of the better ones more likely.

For one task play G trajectories with the current policy. Trajectory i earns one reward R_i. Its advantage is how much
better it did than its group, and every response token of every one of its turns carries that advantage:

    A_i = (R_i - mean(R)) / (std(R) + eps)                                                paper A, Algorithm 1, line 10
    loss = 1/N * sum over the N response tokens of the batch of
               - w * min(rho * A_i, clip(rho, 1 - 0.2, 1 + 0.2) * A_i)  +  0.001 * k3      paper A, A.2
    rho = pi(token) / pi_old(token)        k3 = exp(d) - d - 1,  d = log pi_ref(token) - log pi(token)
    w = 1, and where another engine sampled than the one that trains, min(pi_old(token) / pi_sampler(token), 2)

There is no critic and no process reward: the group is the baseline. Only response tokens enter: prompts and
observations are given, not chosen. This file is also the training loop of the whole project: BudgetMix changes the
budgets it is given, and nothing else.

    python grpo.py --env frozenlake        is full-budget GRPO: every group plays with T_max turns

What was left out on purpose: several optimiser steps per batch, dropping of groups without signal, length-dependent
loss weights.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

import process_rewards
from chat import Sampling
from dynamics import Probe
from engine import add_adapter, load_model, micro_batches, open_engine, response_logprobs, right_aligned
from envs import Task, UsageError
from process_rewards import JudgeOptions
from rollout import TrainedEngine, Trajectory, Turn, play, run_cli
from runs import append, check_name, open_run, plot_training, save_checkpoint
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


def process_advantages(group: list[Trajectory]) -> list[list[float]]:
    """Step rewards of one group (process_rewards.py) -> one float per turn per trajectory: (r - mean) / (std + eps)
    over all scored turns of the group.

    Each turn keeps its own reward: nothing is summed over later turns, since both the oracle's Q* and the judge's score
    already speak of what the action leads to. A turn without a score gets 0.
    """
    scored = [turn.process_reward for t in group for turn in t.turns if turn.process_reward is not None]
    normalised = iter(group_advantages(scored) if scored else [])
    return [[0.0 if turn.process_reward is None else next(normalised) for turn in t.turns] for t in group]


class GroupCredit:
    """How much credit each turn gets: the one thing in which the algorithms differ. This is GRPO's, and the interface.

    GiGPO overrides `turn_advantages`; PPO replaces the whole with a critic, which has weights to learn and to save.
    """

    def __init__(self, args: "Args", base: str | Path, pad: int):
        self.args = args

    @staticmethod
    def check(args: "Args") -> None:
        """Refuse settings that cannot train, before anything is made or written. Raises UsageError."""
        args.check()
        if args.model.startswith("openai:"):
            raise UsageError(f"{args.model} is behind an endpoint and cannot be trained: evaluate it with evaluate.py")
        for name in ("steps", "tasks_per_step", "train_tasks", "micro_batch", "micro_tokens", "save_every", "lora_rank",
                     "lora_alpha"):  # fmt: skip
            if getattr(args, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(args, name)}")
        if args.group_size < 2:
            raise UsageError(
                f"group_size must be at least 2, not {args.group_size}: trajectories are compared in groups"
            )
        for name in ("lr", "clip", "grad_clip"):
            if not getattr(args, name) > 0:
                raise UsageError(f"{name} must be above 0, not {getattr(args, name)}")
        for name in ("kl_coef", "weight_decay", "process_weight", "probe", "is_cap"):
            if not (getattr(args, name) or 0) >= 0:
                raise UsageError(f"{name} must not be negative, not {getattr(args, name)}")
        check_name(args.name, args.out)
        if args.probe and not process_rewards.has_oracle(args.new_env()):
            raise UsageError(f"{args.new_env().name} has no exact action values: leave out --probe")
        if args.process_reward == "judge" and args.observation == "image":
            raise UsageError("a judge only reads: leave out --process-reward judge or --observation image")
        process_rewards.check(args.process_reward, args.judge, args.new_env)

    def turn_advantages(self, group: list[Trajectory]) -> list[list[float]]:
        """One float per turn per trajectory: all turns of a trajectory share its advantage; step rewards add to it."""
        outcome = group_advantages([t.reward for t in group])
        if self.args.process_reward == "none":
            return [[a] * len(t.turns) for a, t in zip(outcome, group, strict=True)]
        steps, weight = process_advantages(group), self.args.process_weight
        return [[a + weight * s for s in own] for a, own in zip(outcome, steps, strict=True)]

    def assign(self, groups: list[list[Trajectory]]) -> tuple[list[list[float]], dict[str, float]]:
        """(for each turn of the batch one advantage per response token, diagnostics)."""
        per_turn = [a for group in groups for trajectory in self.turn_advantages(group) for a in trajectory]
        turns = [turn for group in groups for t in group for turn in t.turns]
        return [[a] * len(turn.response_ids) for a, turn in zip(per_turn, turns, strict=True)], {}

    def learn(self) -> dict[str, float]:
        """Learn from the batch that was assigned last; returns diagnostics. Groups have nothing to learn."""
        return {}

    def learners(self) -> dict[str, Any]:
        """Models and optimisers of its own, by name, that a checkpoint must hold."""
        return {}


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

    lr: float | None = None
    """Learning rate of AdamW, by default 1.5e-3 for the embedded model and 2e-5 for others (paper: 1e-6, for full weights
    of 4 to 8 billion; LoRA usually wants 10 to 50 times that, and a tiny adapter far more)."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    kl_coef: float = 0.001
    """Weight of the k3 KL towards the base model."""
    clip: float = 0.2
    """Clip range of the probability ratio."""
    process_reward: Literal["none", "oracle", "judge"] = "none"
    """Step rewards besides the outcome: exact action values from the environment, or an LLM judge (process_rewards.py)."""
    process_weight: float = 1.0
    """Weight of the step rewards (the paper does not give one)."""
    judge: JudgeOptions = field(default_factory=JudgeOptions)
    grad_clip: float = 1.0
    """Largest norm of the gradient (the paper does not name one)."""
    lora_rank: int = 8
    """Rank of the LoRA adapter on all linear layers (the paper does not say how it trains its weights)."""
    lora_alpha: int = 16
    """Scale of the LoRA adapter: its output is multiplied by alpha / rank."""
    micro_batch: int = 64
    """Most distinct (prompt, response) sequences per forward pass. Changes speed and memory, never the gradient."""
    micro_tokens: int | None = None
    """Most tokens per forward pass, padding included, by default 16384 for the embedded model and smollm2 and 4096 for
    others. Lower it when memory runs out: that changes nothing else."""
    gradient_checkpointing: bool | None = None
    """Keep only each layer's input for the backward pass and compute the rest again: far less memory, a third more time. By
    default for all models but the embedded one and smollm2."""
    is_cap: float | None = None
    """Largest weight of a token whose log-prob in the sampler differs from that in the trainer (truncated importance
    sampling); 0: no weights. By default 2.0 with vLLM and 0 otherwise, where both are the same module."""
    save_every: int = 1
    """Steps between two checkpoints."""
    probe: int = 0
    """Every this many steps measure the quality of single actions (R_single) and the success on held-out tasks at the full
    budget (R_multi), for `analysis.py dynamics`; 0: never. Changes nothing in the training."""

    def __post_init__(self):
        super().__post_init__()
        if self.lr is None:
            self.lr = 1.5e-3 if self.model == "embedded" else 2e-5
        if self.micro_tokens is None:
            self.micro_tokens = 16_384 if self.small else 4096
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = not self.small


# ---- one update ----


def update(
    policy, optimizer, turns: list[Turn], advantages: list[list[float]], pad: int, args: Args, is_cap: float = 0.0
) -> dict[str, float]:
    """One optimiser step on a batch of turns, with one advantage per response token. Returns the diagnostics that tell
    whether learning is healthy.

    With `is_cap`, the turns were sampled by another engine than the policy: each token's policy loss is weighted by the
    ratio of its probability here to that in the sampler, which makes the expectation that of our own samples, and the
    ratio is truncated because a single huge weight would drown the batch.

    The losses of micro-batches are sums divided by one number of tokens for the whole batch: a mean per micro-batch
    would give the tokens of a small one more weight, and the gradient would depend on how the batch was split.
    """
    total_tokens = sum(len(t.response_ids) for t in turns)
    sums = dict.fromkeys(("loss", "kl", "approx_kl", "clip_fraction", "mismatch"), 0.0)
    if is_cap:
        sums["truncated"] = 0.0
    batches = micro_batches(turns, args.micro_batch, args.micro_tokens)
    # The reference is the base model: the same weights with the adapter off.
    with torch.no_grad(), policy.disable_adapter():
        references = [response_logprobs(policy, samples, pad) for samples, _, _ in batches]
    optimizer.zero_grad()
    policy.train(args.gradient_checkpointing)  # transformers checkpoints in training mode only
    for (samples, members, rows), reference in zip(batches, references, strict=True):
        logp, ref_logp = response_logprobs(policy, samples, pad)[rows], reference[rows]  # [U, R] -> [M, R]
        old_logp, mask = right_aligned([turns[i].logprobs for i in members], policy.device)
        advantage, _ = right_aligned([advantages[i] for i in members], policy.device)
        # Columns outside the mask hold log-probs of prompt tokens: zeroed, so that no exp of them can overflow.
        logp, ref_logp, old_logp = logp * mask, ref_logp * mask, old_logp * mask
        kl = k3_kl(logp, ref_logp)
        policy_loss = clipped_loss(logp, old_logp, advantage, args.clip)
        if is_cap:
            # One update per batch: the policy before it is the policy now, and only the sampler is another.
            weight = (logp.detach() - old_logp).exp()
            policy_loss = weight.clamp(max=is_cap) * clipped_loss(logp, logp.detach(), advantage, args.clip)
            sums["truncated"] += ((weight > is_cap) * mask).sum().item() / total_tokens
        per_token = policy_loss + args.kl_coef * kl
        loss = (per_token * mask).sum() / total_tokens
        loss.backward()
        ratio = (logp - old_logp).exp().detach()
        sums["loss"] += loss.item()
        sums["kl"] += (kl.detach() * mask).sum().item() / total_tokens
        sums["approx_kl"] += (k3_kl(logp, old_logp).detach() * mask).sum().item() / total_tokens  # from the sampler
        sums["clip_fraction"] += (((ratio - 1).abs() > args.clip) * mask).sum().item() / total_tokens
        # With one update per batch the sampler and the trainer must agree: in one engine anything above float noise is a
        # bug, with vLLM in half precision hundredths of a nat are usual.
        sums["mismatch"] += ((logp - old_logp).detach().abs() * mask).sum().item() / total_tokens
    policy.eval()
    norm = take_step(policy, optimizer, args.grad_clip)
    return sums | {"grad_norm": norm, "distinct_share": sum(len(samples) for samples, _, _ in batches) / len(turns)}


def take_step(model, optimizer, grad_clip: float) -> float:
    """Clip the gradient and step. Returns its norm before clipping; a norm that is not finite is a UsageError, no step."""
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], grad_clip)
    if not torch.isfinite(norm):
        raise UsageError(
            "the gradient is not finite and the step not taken: lower --lr, or --resume the last checkpoint"
        )
    optimizer.step()
    return norm.item()


# ---- the loop ----


def train(
    args: Args,
    folder: Path,
    sample_budget: Callable[[int, Random], int] = full_budget,
    credit_type: type[GroupCredit] = GroupCredit,
    bar: tqdm | None = None,
) -> Path:
    """Train into a run folder (config.json, metrics.jsonl, trajectories.jsonl, adapter/) and return it.

    What happens in a step depends on (seed, step) alone, so a resumed run repeats exactly what an uninterrupted one
    would do. `bar` is the progress bar of a longer work that this training is a part of; by default it has its own.
    """
    credit_type.check(args)
    tasks = args.new_env().tasks("train", args.train_tasks, args.seed)
    base = args.base()
    model, tokenizer = load_model(base, args.observation == "image")
    policy = add_adapter(model, args.lora_rank, args.lora_alpha, args.seed)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})  # the other way needs inputs with gradients
    engine = open_engine(args, base, policy, tokenizer, args.lora_rank)
    is_cap = args.is_cap if args.is_cap is not None else 2.0 * engine.own_weights
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=args.weight_decay)
    credit = credit_type(args, base, engine.pad)
    probe = Probe(args, base, engine, folder) if args.probe else None
    score = process_rewards.scorer(args.process_reward, args.judge, args.new_env, args.out)
    learners = {"policy": policy, "optimizer": optimizer, **credit.learners()}
    # What the numbers depend on: of the judge only whom it asks and what it sees, not how patiently.
    config = asdict(args) | {"judge": {"model": args.judge.model, "history": args.judge.history}, "base": base}
    config |= {"credit": credit_type.__name__, "budgets": sample_budget.__name__, "engine": type(engine).__name__}
    del config["endpoint"]
    done = open_run(folder, config, learners, args.resume)
    engine.follow(policy)  # a run that is resumed does not start at the base
    if probe:
        probe.begin(done)

    successes: list[float] = []
    bar = bar if bar is not None else tqdm(total=args.steps, unit="step")
    bar.set_description(folder.name)
    bar.update(done)
    for step in range(done, args.steps):
        started = time.perf_counter()
        groups = play_groups(args, engine, tasks, sample_budget, step)
        engine.rest()
        played = time.perf_counter()
        trajectories = [t for group in groups for t in group]
        turns = [turn for t in trajectories for turn in t.turns]
        if not turns:
            raise UsageError(
                f"no prompt fits into the context of {engine.context} tokens: lower --max-tokens or --history"
            )
        metrics = {"step": step + 1, **summarise(groups), **score(trajectories)}
        advantages, diagnostics = credit.assign(groups)
        metrics |= diagnostics | update(policy, optimizer, turns, advantages, engine.pad, args, is_cap) | credit.learn()
        engine.follow(policy)
        seconds = time.perf_counter() - started
        metrics |= {"rollout_s": played - started, "step_s": seconds, "turns_per_s": len(turns) / seconds}
        # One trajectory per group is enough to see what the policy does; all of them would be 16 times as much disk.
        append(folder / "metrics.jsonl", [metrics])
        append(folder / "trajectories.jsonl", [{"step": step + 1, **group[0].record()} for group in groups])
        last = step + 1 == args.steps
        if probe and ((step + 1) % args.probe == 0 or last):
            probe.measure(step + 1)
        if (step + 1) % args.save_every == 0 or last:
            save_checkpoint(folder, learners, step + 1)
        successes.append(metrics["success"])
        bar.set_postfix(
            success=f"{sum(successes[-5:]) / len(successes[-5:]):.0%}",
            budget=f"{metrics['budget']:.0f}",
            kl=f"{metrics['kl']:.3f}",
            turns_per_s=f"{metrics['turns_per_s']:.0f}",
        )
        bar.update()
    plot_training(folder)
    return folder


def play_groups(
    args: Args, engine: TrainedEngine, tasks: list[Task], sample_budget: Callable[[int, Random], int], step: int
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
    seed = args.seed * 1_000_003 + step
    played = play(engine, args.new_env, games, sampling, seed, args.history, args.EPISODE)
    return [played[i : i + args.group_size] for i in range(0, len(played), args.group_size)]


def summarise(groups: list[list[Trajectory]]) -> dict[str, float]:
    """What a batch of groups looked like."""
    trajectories = [t for group in groups for t in group]
    turns = [turn for t in trajectories for turn in t.turns]
    tokens = sum(len(turn.logprobs) for turn in turns)
    facts = {name: sum(t.facts[name] for t in trajectories) / len(trajectories) for name in trajectories[0].facts}
    return facts | {
        "success": sum(t.success for t in trajectories) / len(trajectories),
        "reward": sum(t.reward for t in trajectories) / len(trajectories),
        "budget": sum(t.budget for t in trajectories) / len(trajectories),
        "turns": len(turns) / len(trajectories),
        "out_of_budget": sum(t.stop == "budget" for t in trajectories) / len(trajectories),
        "invalid": sum(not turn.valid for turn in turns) / len(turns),
        "cut_off": sum(turn.cut_off for turn in turns) / len(turns),
        # Minus the mean log-prob of what was sampled estimates the entropy per token: at zero exploration is over.
        "entropy": -sum(sum(turn.logprobs) for turn in turns) / tokens,
        # The share of groups whose rewards differ. From the others outcome-only GRPO learns nothing.
        "groups_with_signal": sum(len({t.reward for t in group}) > 1 for group in groups) / len(groups),
    }


# ---- the command ----


def run_alone(args: Args, algorithm: str, credit_type: type[GroupCredit]) -> None:
    """What `python ALGORITHM.py` does: full-budget training into a folder of its own."""
    signal = "" if args.process_reward == "none" else f"-{args.process_reward}"
    folder = args.out / (args.name or f"{args.env}-{algorithm}{signal}-s{args.seed}")
    train(args, folder, credit_type=credit_type)
    print(f"everything lies in {folder}/; measure it with: python evaluate.py base {folder} --env {args.env}")


def main(args: Args) -> None:
    run_alone(args, "grpo", GroupCredit)


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
