"""What does a training step cost, and where does the time go? GRPO, GiGPO and PPO side by side in one process.

    python bench/step_profile.py

Each round plays one batch per algorithm in turn, from the same weights and seeds, and makes the update. Forward passes are
timed by hooks on the models, backward passes by wrapping Tensor.backward; the rest is Python: environments, prompts,
parsing, sampling, bookkeeping, the optimisers. Medians over the rounds; the first round warms up and is not counted.
"""

import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import gigpo  # noqa: E402
import grpo  # noqa: E402
import ppo  # noqa: E402
from engine import HFEngine, add_adapter, load_model  # noqa: E402
from rollout import run_cli  # noqa: E402


@dataclass
class Args(grpo.Args):
    """Profile training steps."""

    rounds: int = 6
    """Rounds of one step per algorithm."""


class Stopwatch:
    """Seconds spent in forward and backward passes of the models it was given to."""

    def __init__(self):
        self.model_seconds = 0.0
        plain = torch.Tensor.backward

        def timed(tensor, *args, **kwargs):
            started = time.perf_counter()
            plain(tensor, *args, **kwargs)
            self.model_seconds += time.perf_counter() - started

        torch.Tensor.backward = timed

    def watch(self, model) -> None:
        model.register_forward_pre_hook(lambda *_: setattr(self, "started", time.perf_counter()))
        model.register_forward_hook(self._forward_done)

    def _forward_done(self, *_) -> None:
        self.model_seconds += time.perf_counter() - self.started


def main(args: Args) -> None:
    watch, base = Stopwatch(), args.base()
    tasks = args.new_env().tasks("train", args.train_tasks, args.seed)
    shared = {f.name: getattr(args, f.name) for f in fields(grpo.Args)}
    learners = {}
    for name, module, credit_type in (
        ("GRPO", grpo, grpo.GroupCredit),
        ("GiGPO", gigpo, gigpo.AnchorCredit),
        ("PPO", ppo, ppo.CriticCredit),
    ):
        model, tokenizer = load_model(base)
        policy = add_adapter(model, args.lora_rank, args.lora_alpha, args.seed)
        engine = HFEngine(policy, tokenizer)
        credit = credit_type(module.Args(**shared), base, engine.pad)
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=args.lr)
        for learner in (policy, *credit.learners().values()):
            if isinstance(learner, torch.nn.Module):
                watch.watch(learner)
        learners[name] = (engine, credit, optimizer)

    rows: dict[str, list[dict[str, float]]] = {name: [] for name in learners}
    for step in range(args.rounds):
        for name, (engine, credit, optimizer) in learners.items():
            watch.model_seconds, started = 0.0, time.perf_counter()
            groups = grpo.play_groups(args, engine, tasks, grpo.full_budget, step)
            rollout, rollout_model = time.perf_counter() - started, watch.model_seconds
            turns = [turn for group in groups for t in group for turn in t.turns]
            advantages, _ = credit.assign(groups)
            grpo.update(engine.policy, optimizer, turns, advantages, engine.pad, args)
            credit.learn()
            seconds = time.perf_counter() - started
            distinct = {(turn.prompt_ids, turn.response_ids) for turn in turns}
            rows[name].append(
                {
                    "seconds per step": seconds,
                    "turns per second": len(turns) / seconds,
                    "share of model forward and backward": watch.model_seconds / seconds,
                    "  of the rollout": rollout_model / rollout,
                    "  of the rest": (watch.model_seconds - rollout_model) / (seconds - rollout),
                    "distinct samples per turn": len(distinct) / len(turns),
                    "seconds per turn, against GRPO": seconds / len(turns),
                }
            )
    medians = {n: {k: median(row[k] for row in own[1:]) for k in own[0]} for n, own in rows.items()}
    last = "seconds per turn, against GRPO"
    reference = medians["GRPO"][last]
    print(f"{'':38s}" + "".join(f"{name:>9s}" for name in medians))
    for key in rows["GRPO"][0]:
        scale = reference if key == last else 1.0
        print(f"{key:38s}" + "".join(f"{own[key] / scale:9.2f}" for own in medians.values()))


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
