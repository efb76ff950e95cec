"""PPO: a critic that knows what to expect, so that each token is compared with the moment before it.

GRPO asks "was this trajectory better than its group?". PPO asks at every token "did things just get better than
expected?". The expectation is a second model, the critic: V(prompt and response tokens so far) = expected reward.

    delta_j = r_j + gamma * V_{j+1} - V_j                        surprise at response token j
    A_j     = delta_j + gamma * lambda * A_{j+1}                 generalized advantage estimation (Schulman et al., 2018)
    G_j     = A_j + V_j                                          what the critic should have said
    value loss = 1/2 * max( (V - G)^2, (clip(V, V_old - 0.5, V_old + 0.5) - G)^2 )          paper A, A.2: value clip 0.5

j walks the *response tokens of all turns* of a trajectory in order and skips prompts and observations: from the last
token of one turn it steps to the first token of the next. Rewards sit on the last response token of the turn that
earned them, so the outcome is on the very last token. After that token V is zero, also when the budget ran out: with
the turns counted in the prompt, running out is an end like any other and not a cut through a longer game (A.4).

    python ppo.py --env frozenlake

Actor loss, loop, checkpoints are grpo.py's: clipped ratio 0.2, one epoch, 16 trajectories per task, but no group
statistics. Paper A (arXiv 2611.06483) gives no gamma and lambda: both are 1 here, and arguments. Left out on purpose:
warming the critic up (A.2: it learns from the first step on), sharing weights between actor and critic (they have
independent optimisers).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForTokenClassification

import grpo
from engine import DEVICE, DTYPE, Sample, forget_dropout, micro_batches, model_inputs, right_aligned
from envs import UsageError
from rollout import Trajectory, Turn, run_cli

# ---- the maths ----


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """(advantages, returns) for the response tokens of one trajectory, all turns in order; each argument has one entry
    per token. The value after the last token is zero: both termination and an exhausted budget are ends (paper A,
    A.4)."""
    assert len(rewards) == len(values)
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Per-token clipped value loss, the shape of its arguments. The maximum is pessimistic like PPO's policy loss:
    moving more than `clip` away from the value that the batch was judged with earns nothing, moving wrongly is always
    punished."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def token_rewards(trajectory: Trajectory, process_weight: float = 0.0) -> list[float]:
    """One reward per response token: zero but on the last token of each turn, which carries what the turn earned and
    its step reward (process_rewards.py). A turn that the judge left unscored gets the mean of its trajectory's scores.

    Beware: step rewards are summed here, and every one is >= 0, so with gamma 1 a long trajectory collects more of them
    than a short one: dithering for 29 turns before reaching the goal is "worth" 30.5, going straight 2.95. GRPO, which
    compares steps instead of summing them, has no such incentive; with PPO use a small --process-weight, or a gamma < 1.
    """
    scores = [turn.process_reward for turn in trajectory.turns if turn.process_reward is not None]
    neutral = sum(scores) / len(scores) if scores else 0.0
    rewards = []
    for turn in trajectory.turns:
        step = process_weight * (neutral if turn.process_reward is None else turn.process_reward)
        rewards += [0.0] * (len(turn.response_ids) - 1) + [turn.reward + step]
    return rewards


def whiten(rows: list[list[float]]) -> list[list[float]]:
    """Shift and scale to mean 0 and standard deviation 1 over all tokens of the batch, as verl does: the step size then
    does not depend on the scale of the rewards. Equal advantages give 0."""
    flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    if len(flat) < 2 or flat.max() == flat.min():
        return [[0.0] * len(row) for row in rows]
    mean, std = flat.mean().item(), flat.std().item()
    return [[(x - mean) / (std + 1e-8) for x in row] for row in rows]


# ---- the critic ----


class ValueHead(torch.nn.Linear):
    """One output per token, in float32 whatever the model computes in: bfloat16 cannot hold a weight's small steps."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())


def load_critic(base: str | Path, rank: int, alpha: int, seed: int):
    """The base model with a LoRA adapter of its own and one output per token. The head starts at zero: a critic that
    has seen nothing expects nothing, instead of something random."""
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=1, dtype=DTYPE)
    forget_dropout(model)
    model.score = ValueHead(model.config.hidden_size, 1)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.startswith("score")]
    torch.manual_seed(seed + 1)  # not the actor's adapter
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=linear, modules_to_save=["score"], task_type="TOKEN_CLS")
    return get_peft_model(model.to(DEVICE), lora).eval()


def response_values(critic, samples: list[Sample], pad: int) -> Tensor:
    """V *before* each response token of N samples: [N, R], aligned like response_logprobs: the position that predicts a
    token is the moment in which it was chosen."""
    longest = max(len(s.response) for s in samples)
    out = critic(**model_inputs(samples, pad, critic))
    return out.logits[:, -longest - 1 : -1, 0].float()


@dataclass
class Options:
    """What PPO adds to the shared settings."""

    gamma: float = 1.0
    """Discount per response token (the paper does not give it)."""
    lam: float = 1.0
    """GAE's lambda: 1 trusts the rewards, 0 trusts the critic (the paper does not give it)."""
    critic_lr: float = 0.0
    """Learning rate of the critic; 0 means 10 times the actor's, as in the paper (1e-5 to 1e-6)."""
    value_clip: float = 0.5
    """Clip range of the value loss."""


@dataclass
class Args(grpo.Args, Options):
    """Full-budget PPO on an environment. Defaults that differ from paper A (A.2) name the paper's value."""


class CriticCredit(grpo.GroupCredit):
    """Token-level advantages from a critic. Groups do not matter here: a batch is just its trajectories."""

    @staticmethod
    def check(args: Args) -> None:
        grpo.GroupCredit.check(args)
        if args.observation == "image":
            raise UsageError("the critic only reads text: use grpo or gigpo with --observation image")
        if not (0 <= args.gamma <= 1 and 0 <= args.lam <= 1 and args.value_clip > 0 and args.critic_lr >= 0):
            raise UsageError("gamma and lam must be in [0, 1], value_clip above 0, critic_lr not negative")

    def __init__(self, args: Args, base: str | Path, pad: int):
        super().__init__(args, base, pad)
        self.critic, self.pad = load_critic(base, args.lora_rank, args.lora_alpha, args.seed), pad
        weights = [p for p in self.critic.parameters() if p.requires_grad]
        lr = args.critic_lr or 10 * args.lr
        if args.gradient_checkpointing:
            self.critic.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=args.weight_decay)

    @torch.no_grad()
    def values(self, turns: list[Turn]) -> list[list[float]]:
        """V before each response token, one row per turn."""
        rows: list[list[float]] = [[]] * len(turns)
        for samples, members, which in micro_batches(turns, self.args.micro_batch, self.args.micro_tokens):
            predicted = response_values(self.critic, samples, self.pad)[which].tolist()
            for i, row in zip(members, predicted, strict=True):
                rows[i] = row[len(row) - len(turns[i].response_ids) :]
        return rows

    def assign(self, groups: list[list[Trajectory]]) -> tuple[list[list[float]], dict[str, float]]:
        trajectories = [t for group in groups for t in group]
        self.turns = [turn for t in trajectories for turn in t.turns]
        self.old_values = self.values(self.turns)
        weight = self.args.process_weight if self.args.process_reward != "none" else 0.0
        advantages, self.returns, rows = [], [], iter(self.old_values)
        for trajectory in trajectories:
            lengths = [len(turn.response_ids) for turn in trajectory.turns]
            values = [v for _ in lengths for v in next(rows)]
            both = gae(token_rewards(trajectory, weight), values, self.args.gamma, self.args.lam)
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            for flat, target in zip(both, (advantages, self.returns), strict=True):
                target += [flat[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        flat_values, flat_returns = (
            torch.tensor([x for row in r for x in row]) for r in (self.old_values, self.returns)
        )
        spread = flat_returns.var().item()
        # 1: the critic foresees every return; 0: no better than their mean; below: worse than the mean.
        explained = 1 - (flat_returns - flat_values).var().item() / spread if spread > 0 else 0.0
        return whiten(advantages), {"explained_variance": explained, "value_mean": flat_values.mean().item()}

    def learn(self) -> dict[str, float]:
        """One step of the critic on the batch that was assigned last."""
        total = sum(len(turn.response_ids) for turn in self.turns)
        self.optimizer.zero_grad()
        loss_sum = clipped_sum = 0.0
        self.critic.train(self.args.gradient_checkpointing)
        for samples, members, rows in micro_batches(self.turns, self.args.micro_batch, self.args.micro_tokens):
            values = response_values(self.critic, samples, self.pad)[rows]  # [U, R] -> [M, R]
            old, mask = right_aligned([self.old_values[i] for i in members], values.device)
            returns, _ = right_aligned([self.returns[i] for i in members], values.device)
            loss = (value_loss(values, old, returns, self.args.value_clip) * mask).sum() / total
            loss.backward()
            loss_sum += loss.item()
            clipped_sum += (((values.detach() - old).abs() > self.args.value_clip) * mask).sum().item() / total
        self.critic.eval()
        norm = grpo.take_step(self.critic, self.optimizer, self.args.grad_clip)
        return {"value_loss": loss_sum, "value_clip_fraction": clipped_sum, "critic_grad_norm": norm}

    def learners(self) -> dict:
        return {"critic": self.critic, "critic_optimizer": self.optimizer}


def main(args: Args) -> None:
    grpo.run_alone(args, "ppo", CriticCredit)


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
