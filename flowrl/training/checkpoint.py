"""Checkpoints that are whole or not there: written aside, checksummed, renamed into place.

    iteration-000050/
        manifest.json            iteration, identity of the run, size and SHA-256 of every file
        model.safetensors        trained weights          copy-NAME.safetensors   old, ema, reference
        optimizer.pt, state.pt   optimizer; objective, schedule, scaler, counters   (read with weights_only=True)
        rng-RANK.pt              generator states of a process

State dicts come from torch.distributed.checkpoint, which gathers plain, DDP and FSDP2 modules alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from flowrl.training.weights import WeightCopies

PREFIX = "iteration-"
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
_LOAD = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names it and the remedy."""


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`; half-written ones have another name."""
    found = sorted(p for p in root.glob(PREFIX + "*") if (p / "manifest.json").is_file())
    return found[-1] if found else None


def _rng() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002  rewards may use it
    name, keys, position, has_gauss, cached = numpy_state
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash(file)


def _hash(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def save(
    root: Path,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    copies: WeightCopies,
    state: Mapping[str, Any],
    identity: Mapping[str, Any],
    iteration: int,
) -> Path:
    """Write the state after `iteration` iterations and return its folder. Every process calls it."""
    final = root / f"{PREFIX}{iteration:06d}"
    aside = root / f".{final.name}.writing"
    main = accelerator.is_main_process
    if main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    torch.save(_rng(), aside / f"rng-{accelerator.process_index}.pt")
    _save_weights(model, copies.parameters, aside / "model.safetensors", main)
    for name in copies.names:
        with copies.swapped(name):
            _save_weights(model, copies.parameters, aside / f"copy-{name}.safetensors", main)
    moments = get_optimizer_state_dict(model, optimizer, options=_FULL)
    if main:
        torch.save(moments, aside / "optimizer.pt")
        torch.save(dict(state), aside / "state.pt")
    accelerator.wait_for_everyone()
    if main:
        files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(aside.iterdir())}
        manifest = {"iteration": iteration, "identity": dict(identity), "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        replaced = root / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # moved, not deleted: a kill here must not leave the run without a checkpoint
            os.replace(final, replaced)
        os.replace(aside, final)
        shutil.rmtree(replaced, ignore_errors=True)
    accelerator.wait_for_everyone()
    return final


def _save_weights(model: nn.Module, trained: Collection[str], path: Path, main: bool) -> None:
    """Gather the trained weights on all processes and write them on the main one."""
    weights = gathered(model, trained_only=True)
    if main:
        # Buffers stay out: the position table of SD3 alone is a gigabyte.
        save_file({k: v.contiguous() for k, v in weights.items() if k in trained}, path)


def gathered(model: nn.Module, trained_only: bool) -> dict[str, Any]:
    """The whole state dict of a sharded model, on the CPU of the main process; every process calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
    return dict(get_model_state_dict(model, options=options))


def _load_weights(model: nn.Module, path: Path) -> None:
    weights: dict[str, Any] = {**load_file(path)}
    set_model_state_dict(model, weights, options=_LOAD)


def prune(root: Path, keep_last: int) -> None:
    """Drop all but the newest `keep_last` checkpoints."""
    for old in sorted(root.glob(PREFIX + "*"))[:-keep_last]:
        shutil.rmtree(old)


def read_manifest(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Check a checkpoint before anything is loaded from it.

    Raises:
        CheckpointError: not a checkpoint, damaged or cut short, or of another run; nothing has been changed then.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files, theirs = manifest["files"], manifest["identity"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no manifest.json. Pass a folder {PREFIX}NNNNNN, or resume='auto'."
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/manifest.json is damaged ({error}): take another checkpoint") from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"] or _sha256(path) != expected["sha256"]:
            raise CheckpointError(
                f"{path} is missing, cut short or changed. Delete {folder} and resume from the one before it."
            )
    ours = json.loads(json.dumps(dict(identity)))
    different = [_difference(k, theirs.get(k), ours.get(k)) for k in sorted({*ours, *theirs})]
    if any(different):
        shown = "; ".join(d for d in different if d)
        raise CheckpointError(
            f"{folder} belongs to another run ({shown}). Use the settings it was made with (recipe.yaml beside it), or "
            "another output_dir."
        )
    return manifest


def _difference(key: str, there: Any, here: Any) -> str:
    """What two values of a key do not share, in words; empty if they are equal."""
    if there == here:
        return ""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"{key}: {there!r} there, {here!r} here"
    inner = [_difference(f"{key}.{k}", there.get(k), here.get(k)) for k in sorted({*there, *here})]
    inner = [text for text in inner if text]
    return "; ".join(inner) if len(inner) <= 4 else f"{key}: {len(inner)} entries"


def load(
    folder: Path,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    copies: WeightCopies,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Restore everything from a checked checkpoint; returns its `state` with the key `iteration`.

    Raises:
        CheckpointError: see `read_manifest`, or copies of the weights are missing.
    """
    manifest = read_manifest(folder, identity)
    missing = [n for n in copies.names if f"copy-{n}.safetensors" not in manifest["files"]]
    if missing:
        raise CheckpointError(f"{folder} lacks the copies {missing} of the weights that this objective needs")
    for name in copies.names:
        _load_weights(model, folder / f"copy-{name}.safetensors")
        copies.capture(name)
    _load_weights(model, folder / "model.safetensors")
    moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    set_optimizer_state_dict(model, optimizer, moments, options=_LOAD)
    rng = folder / f"rng-{accelerator.process_index}.pt"
    if rng.is_file():  # absent when more processes resume than saved; our draws do not depend on it
        _set_rng(torch.load(rng, map_location="cpu", weights_only=True))
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    accelerator.wait_for_everyone()
    return {**state, "iteration": manifest["iteration"]}
