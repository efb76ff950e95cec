"""Where does a training step spend its time? Share of model forward and backward, and what computing once saves.

    python bench/step_profile.py                 a few steps of full-budget GRPO on the CPU default

Forward passes are timed by hooks on the policy, the backward pass by wrapping Tensor.backward; the rest of the step is
Python: environments, prompts, parsing, sampling, bookkeeping, the optimiser.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo  # noqa: E402
from rollout import HFEngine, add_adapter, load_model, run_cli  # noqa: E402


@dataclass
class Args(grpo.Args):
    """Profile training steps; the first one warms up and is not counted."""

    steps: int = 6
    """Steps to run; the medians are over all but the first."""


class Stopwatch:
    """Seconds spent in forward and backward passes, and the prompts that the engine was asked for and computed."""

    def __init__(self, policy):
        self.forward = self.backward = 0.0
        plain = torch.Tensor.backward
        policy.register_forward_pre_hook(lambda *_: setattr(self, "started", time.perf_counter()))
        policy.register_forward_hook(self._forward_done)

        def timed(tensor, *args, **kwargs):
            started = time.perf_counter()
            plain(tensor, *args, **kwargs)
            self.backward += time.perf_counter() - started

        torch.Tensor.backward = timed

    def _forward_done(self, *_):
        self.forward += time.perf_counter() - self.started


def main(args: Args) -> None:
    model, tokenizer = load_model(args.base())
    policy = add_adapter(model, args.lora_rank, args.lora_alpha, args.seed)
    engine, watch = HFEngine(policy, tokenizer), Stopwatch(policy)
    tasks = args.new_env().tasks("train", args.train_tasks, args.seed)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=args.lr)
    rows = []
    for step in range(args.steps):
        watch.forward = watch.backward = 0.0
        started = time.perf_counter()
        groups = grpo.play_groups(args, engine, tasks, grpo.full_budget, step)
        rollout, rollout_forward = time.perf_counter() - started, watch.forward
        turns = [turn for group in groups for t in group for turn in t.turns]
        advantages = [a for group in groups for per_turn in grpo.turn_advantages(group) for a in per_turn]
        grpo.update(policy, optimizer, turns, advantages, engine.pad, args)
        total = time.perf_counter() - started
        prompts = len({turn.prompt_ids for turn in turns})
        samples = len({(turn.prompt_ids, turn.response_ids) for turn in turns})
        rows.append(
            {
                "seconds per step": total,
                "turns per second": len(turns) / total,
                "share of model forward and backward": (watch.forward + watch.backward) / total,
                "  of the rollout": rollout_forward / rollout,
                "  of the update": (watch.forward - rollout_forward + watch.backward) / (total - rollout),
                "distinct prompts per turn": prompts / len(turns),
                "distinct (prompt, response) per turn": samples / len(turns),
            }
        )
    for key in rows[0]:
        print(f"{key:40s} {median(row[key] for row in rows[1:]):8.2f}")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
