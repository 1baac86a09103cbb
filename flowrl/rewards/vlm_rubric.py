"""Vision-language models as judges by rubric: UnifiedReward, Qwen-VL and rubrics of one's own.

The model writes a text in which regular expressions find its scores. The wording of the rubrics is ours: a model
fine-tuned on another wording wants that, given as `template=`. No released model has been asked by the authors of this
module: it was tested against a server that plays one.
"""

import math
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from flowrl.rewards.base import RewardOutput
from flowrl.rewards.calling import together
from flowrl.rewards.remote import Failed
from flowrl.rewards.vlm_client import ChatClient, Reply
from flowrl.rewards.vlm_judge import Ask, Found, Judge

NUMBER = r"(-?\d+(?:\.\d+)?)(?![\w]|\.\d|\s*-\s*\d)"  # not of "1-5", "1e9" or "10th"


def labelled(label: str) -> str:
    """A pattern for "LABEL: 4", "LABEL Score (1-5): **4.5**" and the like."""
    return rf"{label}(?:\s+score)?(?:\s*\(1\s*-\s*5\))?[\s*]*:[\s*]*{NUMBER}"


class RubricJudge(Judge):
    """A score that a model writes after a rubric: mean over the aspects / the highest level, in (0, 1].

    scores: aspect -> pattern whose first group is its number; ignoring case, the last match counts.
    levels: (lowest, highest) score. A score outside, or none, makes the sample invalid.
    samples, temperature: replies to average, and at which temperature to draw them (seeds 0, 1, ...). Greedy scores
        collapse to a few levels; averaging makes them finer. A sample is judged by the replies that had a score.
    max_tokens: of a reply, its reasoning included. details: the aspects, if several. template, size: see `Judge`.

    Raises ValueError on unusable arguments.
    """

    name = "rubric_judge"
    template = ""
    scores: Mapping[str, str] = {"score": rf"<score>\s*{NUMBER}\s*</score>"}
    levels: tuple[float, float] = (1, 5)
    max_tokens = 1024

    def __init__(
        self,
        server: str | ChatClient,
        template: str | None = None,
        scores: Mapping[str, str] | None = None,
        levels: tuple[float, float] | None = None,
        *,
        samples: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        size: int | None = None,
    ):
        super().__init__(server, template, size)
        self.scores, self.levels = dict(scores or self.scores), levels or self.levels
        self.samples, self.temperature, self.max_tokens = samples, temperature, max_tokens or self.max_tokens
        self._patterns = {aspect: re.compile(pattern, re.IGNORECASE) for aspect, pattern in self.scores.items()}
        if any(pattern.groups != 1 for pattern in self._patterns.values()):
            raise ValueError(f"each pattern of {self.name} needs one group, around the number")
        if not 0 <= self.levels[0] < self.levels[1]:
            raise ValueError(f"levels of {self.name} must be (lowest, highest), lowest at least 0, got {self.levels}")
        self.range = (self.levels[0] / self.levels[1], 1.0)
        if samples < 1 or temperature < 0 or (samples > 1 and not temperature):
            raise ValueError(
                f"{samples} samples need a temperature above 0, got {temperature}: greedy ones are all equal"
            )

    async def __call__(self, images: Tensor, prompts: Sequence[str]) -> RewardOutput:
        return await self._score(images, self._judge, prompts)

    async def _judge(self, ask: Ask, prompt: str) -> Found:
        text = self.template.replace("{prompt}", prompt)
        replies = await together([self._once(ask, text, seed) for seed in range(self.samples)])
        judged = [reply for reply in replies if isinstance(reply, dict)]
        if not judged:
            raise next(reply for reply in replies if isinstance(reply, Failed))
        means = {aspect: sum(reply[aspect] for reply in judged) / len(judged) for aspect in self.scores}
        return sum(means.values()) / len(means) / self.levels[1], means if len(means) > 1 else {}

    async def _once(self, ask: Ask, text: str, seed: int) -> dict[str, float] | Failed:
        try:
            reply = await ask(text, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)
            return {aspect: self._found(aspect, reply) for aspect in self.scores}
        except Failed as failure:
            return failure

    def _found(self, aspect: str, reply: Reply) -> float:
        numbers = self._patterns[aspect].findall(reply.text)
        cut = f", which was cut at max_tokens={self.max_tokens}" if reply.cut else ""
        if not numbers:
            raise Failed(f"no {aspect} in the reply{cut}: ...{reply.text[-100:]!r}", passing=False)
        try:
            number = float(numbers[-1])
        except ValueError:
            number = math.nan
        if not self.levels[0] <= number <= self.levels[1]:
            raise Failed(f"{aspect} is {numbers[-1][:20]!r}, not within {self.levels}", passing=False)
        return number


class QwenVLJudge(RubricJudge):
    """How well an image fits its prompt, 1 to 5 / 5, thought through first; for Qwen2.5-VL, Qwen3-VL and their like."""

    name = "qwenvl_judge"
    max_tokens = 2048
    template = """You are a strict judge of generated images. The image was made for this prompt:
{prompt}

Check one by one whether the objects, their number, colours, materials, positions and any written text are as the \
prompt says, and whether anything looks broken or unnatural. Then give one score:
1: it shows something else; 2: little of the prompt is there; 3: the main thing is there, with clear mistakes;
4: all of it is there, with small flaws; 5: all of it is there and nothing is wrong.
Think in a few sentences, then end with the score in a tag, such as <score>3</score>."""


class UnifiedReward(RubricJudge):
    """UnifiedReward v1 and v1.5 (Wang et al. 2025; `CodeGoat24/UnifiedReward-*`): 1 to 5 / 5, for 512 x 512 images.

    The model answers in the form "Final Score: 3". It was trained on its authors' instruction, which this template
    only resembles: give theirs as `template=` for values like the published ones.
    """

    name = "unified_reward"
    size = 512
    max_tokens = 512
    scores: Mapping[str, str] = {"score": labelled("final")}
    template = """Here are an image made by a generator and the caption it was made for.
Caption: {prompt}

Judge whether the image shows what the caption says, and how good it looks. Rate it from 1 (unrelated or broken) to 5 \
(exactly the caption, no flaw).
Answer in this form:
Final Score: """


class UnifiedReward2(RubricJudge):
    """UnifiedReward 2.0: mean of alignment, coherence and style, each 1 to 5, / 5; details hold the three.

    As for `UnifiedReward`, the wording is ours and `template=` takes the authors'.
    """

    name = "unified_reward_2"
    size = 512
    max_tokens = 512
    scores: Mapping[str, str] = {aspect: labelled(aspect) for aspect in ("alignment", "coherence", "style")}
    template = """Here are an image made by a generator and the caption it was made for.
Caption: {prompt}

Rate three things from 1 (worst) to 5 (best), decimals allowed: Alignment, whether it shows what the caption says; \
Coherence, whether what it shows is whole and possible; Style, how good it looks.
Answer in this form:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z"""
