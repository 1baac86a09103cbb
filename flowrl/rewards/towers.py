"""Frozen open_clip towers: where weights are looked for, how they are read and checked, how pixels are prepared.

`open_clip` takes seconds to import, so it is imported where it is used.
"""

import functools
import json
import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HUB = "hf-hub:"
_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")


def resized(
    images: Tensor, size: int, mode: str = "shortest", interpolation: str = "bicubic", clamp: bool = True
) -> Tensor:
    """Antialiased resize of `[N, 3, H, W]` to `[N, 3, size, size]`, differentiable.

    mode: "shortest" (short side to `size`, centre crop), "longest" (long side to `size`, zeros around it) or "squash".
    clamp: to [0, 1] after each axis, as Pillow's 8-bit resize does (bicubic overshoots). Its further rounding makes a
        difference of up to 1.5/255; new versions take the axes of tall images in the other order, which matters only
        at pixels that overshoot.
    """
    height, width = images.shape[-2:]
    if mode == "shortest":  # torchvision cuts the long side down to an integer
        short = min(height, width)
        shape = (int(size * height / short), int(size * width / short))
    elif mode == "longest":
        shape = tuple(round(side * size / max(height, width)) for side in (height, width))
    elif mode == "squash":
        shape = (size, size)
    else:
        raise ValueError(f"resize mode {mode!r}: use 'shortest', 'longest' or 'squash'")
    scale = functools.partial(F.interpolate, mode=interpolation, antialias=True, align_corners=False)
    x = scale(scale(images, (height, shape[1])).clamp(0, 1), shape).clamp(0, 1) if clamp else scale(images, shape)
    if mode == "longest":
        below, right = size - shape[0], size - shape[1]
        return F.pad(x, (right // 2, right - right // 2, below // 2, below - below // 2))
    top, left = round((shape[0] - size) / 2), round((shape[1] - size) / 2)
    return x[..., top : top + size, left : left + size]


# ---------------------------------------------------------------------------------------- weights


def fetch(repo: str, *names: str, instead: str | None = None) -> Path:
    """The first of these files of a hub repository that is cached or can be downloaded.

    instead: what else the user may do, for the error; default: give the reward a file as `weights`.
    Raises FileNotFoundError naming the file, the command that fetches it and where it is looked for.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    for name in names:  # asked first: without a network the hub's own answer takes half a minute
        if isinstance(cached := try_to_load_from_cache(repo, name), str):
            return Path(cached)
    problem: Exception | None = None
    for name in names:
        try:
            return Path(hf_hub_download(repo, name))
        except OSError as error:  # all errors of the hub and the network
            problem = error
            if isinstance(error, LocalEntryNotFoundError):  # no network: the other names would fail alike
                break
    raise FileNotFoundError(
        f"weights {repo}/{names[0]} are not in {HF_HUB_CACHE} and cannot be downloaded. Where there is a network run "
        f"`hf download {repo} {names[0]}`, copy that cache here and set the environment variable HF_HOME to its "
        f"parent folder; or {instead or _give('weights', names[0])}. ({problem})"
    ) from problem


def _give(argument: str, name: str) -> str:
    return f"give the reward a file: {argument}='/path/to/{Path(name).name}'"


def locate(weights: str | Path, argument: str = "weights") -> Path:
    """A file from a path, a folder with weights under a usual name, or `hf-hub:owner/repository[/file]`.

    argument: the reward's own, which names the file; for the error. Raises FileNotFoundError.
    """
    if str(weights).startswith(HUB):
        owner, repo, *file = str(weights)[len(HUB) :].split("/")
        names = ["/".join(file)] if file else _FILES
        return fetch(f"{owner}/{repo}", *names, instead=_give(argument, names[0]))
    path = Path(weights).expanduser()
    for candidate in (path, *(path / name for name in _FILES)):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"no {argument} at {str(path)!r}: give a file, or a folder that holds one of {list(_FILES)}"
    )


def read(path: Path) -> dict[str, Tensor]:
    """A state dict from safetensors, or from a torch file without running code of its own."""
    from open_clip.factory import load_state_dict

    try:
        return load_state_dict(str(path), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a plain state dict ({str(error).splitlines()[0]}); TorchScript archives and pickled "
            "objects are not read: use the safetensors file"
        ) from error


_RENAMES = {
    "vision_model.embeddings.patch_embedding": "visual.conv1",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm": "visual.ln_pre",  # sic
    "vision_model.post_layernorm": "visual.ln_post",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
    "visual_projection.weight": "visual.proj",
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm": "ln_final",
    "text_model.encoder.layers": "transformer.resblocks",
    "text_projection.weight": "text_projection",
    ".layer_norm": ".ln_",
    ".self_attn.out_proj": ".attn.out_proj",
    ".self_attn.q_proj.": ".attn.in_proj_",
    ".mlp.fc1": ".mlp.c_fc",
    ".mlp.fc2": ".mlp.c_proj",
}


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a transformers `CLIPModel` under the names of an open_clip `CLIP`.

    Queries, keys and values are stacked into one matrix and the two projections are transposed.
    """
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.endswith("position_ids") or re.search(r"\.[kv]_proj\.", key):  # a buffer of old versions; stacked below
            continue
        if ".q_proj." in key:
            value = torch.cat([state[key.replace(".q_proj.", f".{x}_proj.")] for x in "qkv"])
        for old, new in _RENAMES.items():
            key = key.replace(old, new)
        renamed[key] = value.T.contiguous() if key in ("visual.proj", "text_projection") else value
    return renamed


# ---------------------------------------------------------------------------------------- towers


@dataclass
class Tower:
    """A frozen float32 open_clip model with its preprocessing (`size`, `mean`, `std`, `resize_mode`, ...)."""

    model: nn.Module
    preprocess: Mapping[str, Any]
    tokenizer_name: str

    @functools.cached_property
    def tokenizer(self) -> Callable[[Sequence[str]], Tensor]:
        import open_clip

        try:
            return open_clip.get_tokenizer(self.tokenizer_name)
        except OSError as error:
            raise FileNotFoundError(
                f"the tokenizer of {self.tokenizer_name} is not at hand and cannot be downloaded; fetch its repository "
                f"with `hf download` and set HF_HOME, or use a tower with CLIP's own tokenizer. ({error})"
            ) from error

    def images(self, pixels: Tensor, resize: str | None = None, clamp: bool = True) -> Tensor:
        """Unit embeddings `[N, D]` of `[N, 3, H, W]` in [0, 1]."""
        p = self.preprocess
        size = p["size"] if isinstance(p["size"], int) else p["size"][0]
        x = resized(pixels, size, resize or p["resize_mode"], p["interpolation"], clamp)
        mean, std = (x.new_tensor(p[key]).reshape(3, 1, 1) for key in ("mean", "std"))
        return self.model.to(pixels.device).encode_image((x - mean) / std, normalize=True)  # ty: ignore

    def texts(self, prompts: Sequence[str], device: torch.device) -> Tensor:
        """Unit embeddings `[N, D]`; what exceeds the context (77 tokens for CLIP) is cut off."""
        distinct = list(dict.fromkeys(prompts))  # a group shares its prompt
        found = self.model.to(device).encode_text(self.tokenizer(distinct).to(device), normalize=True)  # ty: ignore
        return found[[distinct.index(prompt) for prompt in prompts]]


@functools.cache
def load(model: str, weights: str | None) -> Tower:
    """A tower; the same arguments give the same object, so that rewards share it.

    model: an open_clip architecture, or a folder or `hf-hub:owner/repository` with an `open_clip_config.json`.
    weights: an open_clip tag, or what `locate` takes, in the format of open_clip or of transformers' `CLIPModel`; None
        means those beside the config.
    Torch's global CPU generator is put back to where it was, so nothing else should draw from it meanwhile.
    Raises FileNotFoundError when something is absent; ValueError on an unknown architecture, weights that do not fit,
    and weights trained with another activation than the architecture has (GELU, QuickGELU).
    """
    name, config, tag = _architecture(model, weights)
    quick = bool(config.get("quick_gelu"))
    if tag:
        _check_activation(model, quick, bool(tag.get("quick_gelu")), str(weights))
        repo, _, file = tag["hf_hub"].rpartition("/")
        path = fetch(repo, *([file] if file else _FILES[:2]))
    else:
        path = locate(weights or model)
    state = read(path)
    net = _untrained(name, tag)
    try:
        _fill(net, state, path, model, quick)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"the weights {path} are not those of {model}: {error}") from error
    needs_files = model.startswith(HUB) and config["text_cfg"].get("hf_tokenizer_name")
    net.requires_grad_(False).eval()
    return Tower(net, net.visual.preprocess_cfg, model if needs_files else name)


def _architecture(model: str, weights: str | None) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What open_clip calls the model, its config, and that of the pretrained tag if `weights` is one."""
    import open_clip

    name, tag = model, {}
    if model.startswith(HUB):
        instead = "give the reward a folder that has it: model='/path/to/folder'"
        name = f"local-dir:{fetch(model[len(HUB) :], 'open_clip_config.json', instead=instead).parent}"
    elif Path(model).is_dir():
        if not (Path(model) / "open_clip_config.json").is_file():
            remedy = "name the architecture as model, and this folder as weights"
            raise FileNotFoundError(f"{model} has no open_clip_config.json; {remedy}")
        name = f"local-dir:{model}"
    elif weights:
        tag = open_clip.get_pretrained_cfg(model, weights)
    config = open_clip.get_model_config(name)
    if config is None:
        raise ValueError(f"open_clip.list_models() has no {model!r}, and there is no such folder")
    if name == model and not tag and not (weights and (weights.startswith(HUB) or Path(weights).exists())):
        known = open_clip.list_pretrained_tags_by_model(model)
        raise FileNotFoundError(f"weights {weights!r} of {model}: no such file, and open_clip's tags are {known}")
    return name, config, tag


def _untrained(name: str, tag: dict[str, Any]) -> Any:
    """The model with random weights."""
    import open_clip

    root, random = logging.getLogger(), lambda record: record.module != "factory"
    root.addFilter(random)  # open_clip warns of random weights, while we are about to load others
    try:
        with torch.random.fork_rng(devices=[]):  # nor may they move the run's generator
            return open_clip.create_model(
                name, load_weights=False, pretrained_image=False, pretrained_text=False, force_preprocess_cfg=tag
            )
    finally:
        root.removeFilter(random)


def _fill(net: Any, state: Mapping[str, Tensor], path: Path, model: str, quick: bool) -> None:
    """Put the weights of `path`, which are `state`, into the model."""
    import open_clip

    if not any(key.startswith("vision_model.") for key in state):
        open_clip.load_checkpoint(net, str(path))  # it knows the formats of all its models
        return
    beside = path.parent / "config.json"
    trained = json.loads(beside.read_text()).get("vision_config", {}) if beside.is_file() else {}
    if "hidden_act" in trained:
        _check_activation(model, quick, trained["hidden_act"] == "quick_gelu", str(path))
    net.load_state_dict(from_transformers(state))


def _check_activation(model: str, has_quick: bool, trained_quick: bool, weights: str) -> None:
    if has_quick != trained_quick:
        kind = ("GELU", "QuickGELU")
        twin = model.removesuffix("-quickgelu") if has_quick else f"{model}-quickgelu"
        remedy = 'set "quick_gelu" in its open_clip_config.json' if Path(model).is_dir() else f"use model={twin!r}"
        raise ValueError(
            f"QuickGELU mismatch: {model} uses {kind[has_quick]}, the weights {weights} were trained with "
            f"{kind[trained_quick]}, so every score would be off; {remedy}"
        )
