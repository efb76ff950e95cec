"""A run folder that survives being killed: every file is whole at every moment, and what is resumed is exact.

    runs/<name>/config.json          the arguments, written once; a run resumed with others is refused
                metrics.jsonl        one line a training step
                trajectories.jsonl   one trajectory of each group of each step
                state.pt             weights and optimisers after the last saved step: all that resuming needs
                adapter/             the same weights as a standard PEFT adapter, for everybody else
                probe.jsonl          step quality and success on held-out tasks, where --probe asked for it
                training.png         success, entropy and KL over the steps

A file is replaced by writing its successor beside it and renaming, which the operating system does whole or not at all.
Of a checkpoint, state.pt is written last: only with it a step counts as saved. The logs are only appended to; since a
kill may come after a step was logged and before it was saved, resuming first forgets the log lines (and a half-written
last line) of steps that will be done again.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from envs import UsageError
from plots import panels, save

FREE_ON_RESUME = {  # may differ from the stored run
    "resume",
    "out",
    "name",
    "steps",
    "save_every",
    "micro_batch",
    "micro_tokens",
    "gradient_checkpointing",
    "tensor_parallel",
    "gpu_memory",
    "sample_batch",
    "probe",
}


def make_folder(path: Path) -> Path:
    """Create a folder and prove that it can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".probe").touch()
        (path / ".probe").unlink()
    except OSError as error:
        raise UsageError(f"cannot write to the folder {path}: {error.strerror}; name another with --out") from None
    return path


def check_name(name: str, out: Path) -> None:
    """Refuse a folder's name that leads out of `out`. Raises UsageError."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UsageError(f"name must stay inside the folder {out}, not {name!r}")


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` make the file under another name, then put it in place at once."""
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, lambda part: part.write_text(json.dumps(value, indent=1, default=str) + "\n"))


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises UsageError when it is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UsageError(f"{path} is damaged ({error}): remove it, or its folder, and run again") from None


def stored_config(run: Path) -> dict:
    """config.json of a run, begun or finished. Raises UsageError when it is damaged or something else."""
    config = read_json(run / "config.json")
    known = {"env", "env_args", "history", "max_tokens", "model", "seed", "base", "credit", "budgets"}
    if not isinstance(config, dict) or known - set(config):
        raise UsageError(f"{run / 'config.json'} is not the config of a run: remove {run} and run again")
    return {"observation": "text", "thinking": False} | config  # which the first runs did not write down


def read_config(run: Path) -> dict:
    """config.json of a trained run."""
    if not (run / "config.json").exists() or not (run / "adapter").exists():
        raise UsageError(f"{run} is not a trained run: it has no config.json and adapter/")
    return stored_config(run)


CREDIT_NAMES = {"GroupCredit": "GRPO", "AnchorCredit": "GiGPO", "CriticCredit": "PPO"}


def run_label(config: dict) -> str:
    """How a run was trained, for tables: "GRPO + BudgetMix", "GRPO + oracle", or with a credit rule or a distribution of
    budgets of your own its name."""
    signal = config.get("process_reward", "none")
    budgets = {"full_budget": "", "sample_budget": "BudgetMix"}.get(config["budgets"], config["budgets"])
    parts = [CREDIT_NAMES.get(config["credit"], config["credit"]), signal if signal != "none" else "", budgets]
    return " + ".join(part for part in parts if part)


def trainable(model) -> dict[str, torch.Tensor]:
    """The weights that training changes, by name."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def open_run(folder: Path, config: dict, learners: dict[str, Any], resume: bool) -> int:
    """Start a run folder, or with `resume` load its last checkpoint into the learners (models and optimisers by name).
    Returns the steps done.

    Raises UsageError when the folder cannot be written, holds a run already, or was made with other settings.
    """
    config = json.loads(json.dumps(config, default=str))  # as it will be read back
    stored = folder / "config.json"
    if not resume:
        if stored.exists():
            raise UsageError(f"{folder} holds a run already: continue it with --resume, or choose another --name")
        make_folder(folder)
        write_json(stored, config)
        return 0
    if not stored.exists():
        raise UsageError(f"there is no run in {folder} to resume: start it without --resume")
    before = stored_config(folder)
    changed = [k for k in before | config if k not in FREE_ON_RESUME and before.get(k) != config.get(k)]
    if changed:
        differences = ", ".join(f"{k} was {before.get(k)!r} and is now {config.get(k)!r}" for k in changed)
        raise UsageError(f"cannot resume {folder} with other settings: {differences}")
    step = 0
    if (folder / "state.pt").exists():
        try:
            state = torch.load(folder / "state.pt", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            raise UsageError(f"{folder / 'state.pt'} is damaged: remove {folder} and run again") from None
        step = state["step"]
        if config.get("steps", step) < step:
            raise UsageError(f"{folder} has {step} steps behind it already: resume it with --steps {step} or more")
        for name, learner in learners.items():
            if isinstance(learner, torch.optim.Optimizer):
                learner.load_state_dict(state[name])
            else:
                for key, weight in trainable(learner).items():
                    weight.copy_(state[name][key])
    write_json(stored, config)  # with more steps, say
    for log in (folder / "metrics.jsonl", folder / "trajectories.jsonl", folder / "probe.jsonl"):
        if log.exists():
            lines = log.read_text().splitlines(keepends=True)
            try:
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{log} holds a damaged line: remove {folder} and run again") from None
            replace_file(log, lambda part, kept=kept: part.write_text("".join(kept)))
    return step


def save_checkpoint(folder: Path, learners: dict[str, Any], step: int) -> None:
    """Save the one called "policy" as a PEFT adapter, and then all of them in state.pt."""
    new = folder / "adapter.part"
    shutil.rmtree(new, ignore_errors=True)
    learners["policy"].save_pretrained(new)
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    os.replace(new, folder / "adapter")
    state = {
        name: learner.state_dict() if isinstance(learner, torch.optim.Optimizer) else trainable(learner)
        for name, learner in learners.items()
    }
    replace_file(folder / "state.pt", lambda part: torch.save(state | {"step": step}, part))


def append(log: Path, records: list[dict]) -> None:
    """Append one line per record to a log of a run folder; each names its "step"."""
    with open(log, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def plot_training(folder: Path) -> None:
    """training.png from metrics.jsonl: does it learn (success), still explore (entropy), stay near the base (KL)?"""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, (axes,) = panels(1, 3, width=3.6, height=2.5)
    names = {"success": "success rate", "entropy": "entropy per token, nats", "kl": "KL to base, nats per token"}
    for axis, (key, name) in zip(axes, names.items(), strict=True):
        values = [row[key] for row in rows]
        smooth = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
        axis.plot([row["step"] for row in rows], values, color="#0072B2", alpha=0.3, lw=1)
        axis.plot([row["step"] for row in rows], smooth, color="#0072B2", label="mean of 5 steps")
        axis.set(xlabel="training step", ylabel=name)
    axes[0].legend()
    save(figure, folder / "training.png")
