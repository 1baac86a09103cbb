"""What a reward is: what it takes and returns, its pixels, its name. `RewardSet` calls several and checks them."""

import difflib
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from PIL import Image
from torch import Tensor

Reward: TypeAlias = Callable[..., Any]
"""`reward(images, prompts, **columns) -> list[float] | Tensor | RewardOutput`, or an awaitable of one.

`images`: float [N, 3, H, W] in [0, 1] (a plain list of N items for generators of text); `prompts`: N strings;
`columns`: the prompt metadata, each a list of N, passed by name to the parameters the signature declares
(all of them to `**kwargs`). The two first arguments are passed by position.

What else a reward may say of itself, as attributes:
    differentiable = True   promises a gradient from the values to the pixels.
    groupwise = True        compares the samples of a prompt: it needs whole groups in one call and gets `group_id`,
                            N integers, equal for the samples of one prompt. A parameter of that name says the same.
    remote = True           waits for a server: a function that is not async is then called in a thread of its own.
    range = (low, high)     bounds of its values; one outside is an error.
    fingerprint = "..."     which weights or version it runs, for a resumed run to recognise.
    check_prompts(texts)    raises ValueError when it cannot score a prompt, before training starts.
    known_pair()            -> (images, prompts, columns): a good sample and a bad one, for `RewardSet.self_test`.
"""
Spec: TypeAlias = "str | Reward | Mapping[str | Reward, float] | list[Spec] | tuple[Spec, ...]"
R = TypeVar("R", bound=Callable[..., Any])
GROUP = "group_id"


@dataclass
class RewardOutput:
    """The values of one reward, and which of them count.

    values: [N] float, in the reward's own unit; NaN and inf are allowed only where `valid` is False.
    valid: [N] bool, False where a sample could not be scored (time-out, bad reply); None means all valid.
    details: named columns to log, each a tensor [N] or a list of N; `details["reason"]` is quoted in errors.
    """

    values: Tensor
    valid: Tensor | None = None
    details: dict[str, Tensor | list] = field(default_factory=dict)


@dataclass
class Scores:
    """What a `RewardSet` found for N samples, on the CPU.

    total: [N] float32, sum_i w_i r_i; NaN where invalid.
    parts: name -> [N] float32, the unweighted r_i; NaN where that reward is invalid.
    valid: [N] bool, True where every part with a weight is valid.
    details: name -> that reward's details.
    """

    total: Tensor
    parts: dict[str, Tensor]
    valid: Tensor
    details: dict[str, dict[str, Tensor | list]]

    def output(self) -> RewardOutput:
        """The total as one reward's output; its details are the parts and, where a part gave some, the reasons."""
        reasons = [found["reason"] for found in self.details.values() if "reason" in found]
        said = ["; ".join(str(text) for text in texts if text) for texts in zip(*reasons, strict=True)]
        return RewardOutput(self.total, self.valid, self.parts | ({"reason": said} if reasons else {}))


class RewardError(RuntimeError):
    """A reward failed; carries the samples so that the caller can `save` them.

    reward: its name; "(input)" when the images themselves are broken. rows: those at fault (all when the
    whole call failed). images, prompts, columns: the batch.
    """

    def __init__(self, message: str, reward: str, images, prompts: Sequence[str], columns=None, rows=None):
        super().__init__(f"reward {reward!r}: {message}")
        self.reward = reward
        self.images, self.prompts, self.columns = images, list(prompts), dict(columns or {})
        self.rows = list(range(len(self.prompts))) if rows is None else list(rows)

    def save(self, directory: str | Path) -> Path:
        """Write the rows at fault as `row_00000.png` plus `error.json`; returns the path of the JSON.

        Non-finite pixels are painted black, since they have no 8-bit value.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        samples: list[dict[str, Any]] = []
        for row in self.rows:
            sample: dict[str, Any] = {"row": row, "prompt": self.prompts[row]}
            if isinstance(self.images, Tensor):
                sample["image"] = f"row_{row:05d}.png"
                pixels = torch.nan_to_num(self.images[row : row + 1].detach().float(), 0.0, 0.0, 0.0)
                Image.fromarray(_bytes(pixels)[0].cpu().numpy()).save(directory / sample["image"])
            else:
                sample["media"] = self.images[row]
            sample["columns"] = {key: column[row] for key, column in self.columns.items()}
            samples.append(sample)
        path = directory / "error.json"
        report = {"reward": self.reward, "error": str(self), "samples": samples}
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False, default=repr), encoding="utf-8")
        return path


# ---------------------------------------------------------------------------------------- pixels


def _bytes(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or not images.numel() or not images.is_floating_point():
        raise ValueError(
            f"images must be a float tensor [N, 3, H, W] in [0, 1], got {images.dtype} {list(images.shape)}"
        )
    low, high = images.detach().aminmax()  # NaN if any pixel is
    if not (low >= -0.5 and high <= 1.5):  # decoders overshoot a little; another range is a mistake
        raise ValueError(f"images must lie in [0, 1], got [{low:.3g}, {high:.3g}]; rescale them first")


def quantise(images: Tensor) -> Tensor:
    """Images as a PNG would hold them: round(255 clamp(x, 0, 1)).

    images: float [N, 3, H, W] in [0, 1]. Returns uint8 [N, H, W, 3] on the same device. Every reward that
    leaves the tensor world goes through here, so all see the same pixels. Raises ValueError on another
    shape, dtype or range and on non-finite pixels.
    """
    _check_images(images)
    return _bytes(images.detach().float())


def to_pil(images: Tensor) -> list[Image.Image]:
    """`quantise`d images as N RGB PIL images; raises as `quantise` does."""
    return [Image.fromarray(pixels) for pixels in quantise(images).cpu().numpy()]


# ---------------------------------------------------------------------------------------- names

_REGISTRY: dict[str, Callable[..., Any]] = {}
# Rewards that register themselves when their module is first asked for, so that naming one loads no other.
_HOMES = {
    "shapes": "flowrl.miniature.shapes.reward",
    "shapes_official": "flowrl.miniature.shapes.reward",
    "glyphs": "flowrl.miniature.glyphs.reward",
    "glyphs_exact": "flowrl.miniature.glyphs.reward",
}
_AT_URL = {  # rewards behind a server, named KIND@URL
    "remote": "flowrl.rewards.remote:RemoteReward",
    "qwenvl_judge": "flowrl.rewards.vlm_rubric:QwenVLJudge",
    "soft_tifa": "flowrl.rewards.vlm_judge:SoftTIFA",
    "unified_reward": "flowrl.rewards.vlm_rubric:UnifiedReward",
    "unified_reward_2": "flowrl.rewards.vlm_rubric:UnifiedReward2",
    "vqascore": "flowrl.rewards.vlm_judge:VQAScore",
}


def register(name: str) -> Callable[[R], R]:
    """Decorator: make a reward function, or a class whose instances are rewards, known as `name`.

    Raises ValueError when another reward has the name.
    """

    def add(reward: R) -> R:
        if _REGISTRY.setdefault(name, reward) is not reward:
            raise ValueError(f"reward name {name!r} is taken by {_REGISTRY[name]!r}")
        return reward

    return add


def names() -> list[str]:
    """The registered reward names, sorted."""
    return sorted({*_REGISTRY, *_HOMES})


def resolve(reward: str | Reward) -> Reward:
    """The callable behind a registered name, a server's `KIND@URL`, a `module:attribute` path or a callable.

    A class is instantiated without arguments. Raises ValueError on an unknown name (with the nearest known
    ones) or path, TypeError on something not callable.
    """
    found = _look_up(reward) if isinstance(reward, str) else reward
    if inspect.isclass(found):
        found = found()
    if not callable(found):
        raise TypeError(f"a reward is a name or a callable (images, prompts, **columns), got {reward!r}")
    return found


def _look_up(name: str) -> Any:
    kind, at, url = name.partition("@")
    if name not in _REGISTRY and name in _HOMES:
        importlib.import_module(_HOMES[name])
    if name in _REGISTRY:
        return _REGISTRY[name]
    if at and kind in _AT_URL:
        return _attribute(_AT_URL[kind])(url)
    if ":" in name and not at:
        try:
            return _attribute(name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot load reward {name!r}: {error}") from error
    asked = f"{kind}@URL" if "://" in url else name
    close = difflib.get_close_matches(asked, [*names(), *(f"{kind}@URL" for kind in _AT_URL)], n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(names())}."
    raise ValueError(f"unknown reward {name!r}; {hint} Your own function is given as 'module:function'.")


def _attribute(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def _name(reward: str | Reward) -> str:
    if isinstance(reward, str):
        return reward
    while isinstance(reward, functools.partial):
        reward = reward.func
    own = getattr(reward, "name", None)
    if isinstance(own, str):
        return own
    name = getattr(reward, "__name__", None) or type(reward).__name__
    if name == "<lambda>":
        code = reward.__code__  # ty: ignore[missing-attribute]
        return f"lambda_{Path(code.co_filename).stem.strip('<>')}_{code.co_firstlineno}"
    return name


def _known(call: Reward, name: str) -> str:
    """What a run knows a reward by: its fingerprint, or else the name."""
    own = getattr(call, "fingerprint", None)
    return f"{_name(call)} {own}" if isinstance(own, str) and own else name
