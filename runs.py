"""A run folder that survives being killed: every file is whole at every moment, and what is resumed is exact.

    runs/<name>/config.json          the arguments, written once; a run resumed with others is refused
                metrics.jsonl        one line a training step
                trajectories.jsonl   one trajectory of each group of each step
                state.pt             weights and optimisers after the last saved step: all that resuming needs
                adapter/             the same weights as a standard PEFT adapter, for everybody else

A file is replaced by writing its successor beside it and renaming, which the operating system does whole or not at all.
The logs are only appended to; since a kill may come after a step was logged and before it was saved, resuming first
forgets the log lines (and a half-written last line) of steps that will be done again.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from envs import UsageError

FREE_ON_RESUME = {"resume", "out", "name", "steps", "save_every", "micro_batch"}  # may differ from the stored run


def make_folder(path: Path) -> Path:
    """Create a folder and prove that it can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".probe").touch()
        (path / ".probe").unlink()
    except OSError as error:
        raise UsageError(f"cannot write to the folder {path}: {error.strerror}; name another with --out") from None
    return path


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` make the file under another name, then put it in place at once."""
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, lambda part: part.write_text(json.dumps(value, indent=1, default=str) + "\n"))


def read_config(run: Path) -> dict:
    """config.json of a trained run."""
    if not (run / "config.json").exists() or not (run / "adapter").exists():
        raise UsageError(f"{run} is not a trained run: it has no config.json and adapter/")
    return json.loads((run / "config.json").read_text())


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
        raise UsageError(f"there is no run in {folder} to resume")
    before = json.loads(stored.read_text())
    changed = [k for k in config if k not in FREE_ON_RESUME and before.get(k) != config[k]]
    if changed:
        differences = ", ".join(f"{k} was {before.get(k)!r} and is now {config[k]!r}" for k in changed)
        raise UsageError(f"cannot resume {folder} with other settings: {differences}")
    step = 0
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt", weights_only=True)
        step = state["step"]
        for name, learner in learners.items():
            if isinstance(learner, torch.optim.Optimizer):
                learner.load_state_dict(state[name])
            else:
                for key, weight in trainable(learner).items():
                    weight.copy_(state[name][key])
    for log in (folder / "metrics.jsonl", folder / "trajectories.jsonl"):
        if log.exists():
            lines = log.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            replace_file(log, lambda part, kept=kept: part.write_text("".join(kept)))
    return step


def save_checkpoint(folder: Path, learners: dict[str, Any], step: int) -> None:
    """Save the learners, and the one called "policy" also as a PEFT adapter."""
    state = {
        name: learner.state_dict() if isinstance(learner, torch.optim.Optimizer) else trainable(learner)
        for name, learner in learners.items()
    }
    replace_file(folder / "state.pt", lambda part: torch.save(state | {"step": step}, part))
    new = folder / "adapter.part"
    shutil.rmtree(new, ignore_errors=True)
    learners["policy"].save_pretrained(new)
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    os.replace(new, folder / "adapter")


def log_step(folder: Path, metrics: dict, records: list[dict]) -> None:
    """Append one step to metrics.jsonl and its trajectories to trajectories.jsonl."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    with open(folder / "trajectories.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
