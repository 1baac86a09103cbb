"""Vision-language models as judges by one-word answers: VQAScore and GenEval 2's Soft-TIFA.

They ask an OpenAI-compatible server that sees images (see `ChatClient`) for one token and read the probabilities of the
likeliest ones: cheap, and finer than the scores of a rubric. No released model has been asked by the authors of this
module: it was tested against a server that plays one.
"""

import asyncio
import functools
import hashlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from flowrl.rewards.base import RewardOutput, to_pil
from flowrl.rewards.calling import together
from flowrl.rewards.clip_family import CLIPScore
from flowrl.rewards.remote import Failed, png
from flowrl.rewards.vlm_client import TOP, ChatClient, Reply

log = logging.getLogger(__name__)
Ask: TypeAlias = Callable[..., Awaitable[Reply]]
"""`await ask(text, **sampling)`: one question about one image."""
Found: TypeAlias = tuple[float, dict[str, Any]]
"""A sample's value and details."""


class Judge:
    """Asks a server about each sample. Those it cannot judge are invalid, with details["reason"], never 0.

    server: the base URL, usually ending in /v1; `URL#MODEL`; or a `ChatClient` with options of its own.
    template: replaces the question; "{prompt}" in it stands for the sample's prompt.
    size: images are sent as PNGs resized to size x size (bicubic), whatever their shape; 0: as they are.
    """

    name: str
    template: str
    size = 0
    range = (0.0, 1.0)

    def __init__(self, server: str | ChatClient, template: str | None = None, size: int | None = None):
        self.client = server if isinstance(server, ChatClient) else ChatClient(server)
        self.template = self.template if template is None else template
        self.size = self.size if size is None else size
        if self.size < 0 or not self.template.strip():
            raise ValueError(f"{self.name} needs a template and a size of at least 0")
        self._named = self.client.model or "the server's only model"  # as of now: a fingerprint must not change

    @property
    def fingerprint(self) -> str:
        """The model, as far as it was named, and what is asked of it."""
        asked = {key: value for key, value in vars(self).items() if key != "client" and not key.startswith("_")}
        says = repr((sorted(asked.items()), sorted(self.client.extra_body.items())))
        return f"{self._named} {hashlib.sha256(says.encode()).hexdigest()[:12]}"

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        """The CLIP family's: a red disc before a blue one, both called red."""
        return CLIPScore().known_pair()

    async def _score(self, images: Tensor, judge: Callable[..., Awaitable[Found]], *columns: Sequence) -> RewardOutput:
        """`judge(ask, *row)` for every sample."""
        if not isinstance(images, Tensor):
            raise TypeError(f"{self.name} judges image tensors [N, 3, H, W]")
        pictures, n = await asyncio.to_thread(to_pil, images), len(images)  # beside the loop, which is everybody's
        found: list[Found | None] = [None] * n
        reasons = [""] * n
        slots = asyncio.Semaphore(self.client.concurrency)

        async def one(session: Any, row: int) -> None:
            async with slots:  # so that few PNGs are held at a time
                image = await asyncio.to_thread(self._png, pictures[row])
                try:
                    ask = functools.partial(self.client.ask, session, image)
                    found[row] = await judge(ask, *[column[row] for column in columns])
                except Failed as failure:
                    reasons[row] = self.client.clean(str(failure))

        try:
            async with self.client.session() as session:
                await together([one(session, row) for row in range(n)])
        except Failed as failure:  # not even the model's name
            reasons = [self.client.clean(str(failure))] * n
        return _output(found, reasons)

    def _png(self, picture: Image.Image) -> str:
        if self.size:
            picture = picture.resize((self.size, self.size), Image.Resampling.BICUBIC)
        return png(picture)


def _output(found: Sequence[Found | None], reasons: list[str]) -> RewardOutput:
    values = torch.tensor([math.nan if one is None else one[0] for one in found])
    keys = {key: None for one in found if one is not None for key in one[1]}
    details: dict[str, Any] = {}
    for key in keys:
        column = [None if one is None else one[1].get(key) for one in found]
        numbers = all(value is None or isinstance(value, float) for value in column)
        details[key] = torch.tensor([math.nan if value is None else value for value in column]) if numbers else column
    if any(reasons):
        details["reason"] = reasons
    return RewardOutput(values, torch.tensor([one is not None for one in found]), details)


class _OneWord(Judge):
    """Judges by the probabilities of the first token; by the text, all or nothing, where a server gives none."""

    _probabilities: bool | None = None  # whether the server gives them, once that is known

    async def _answer(self, ask: Ask, question: str) -> Reply:
        """The reply, with `top` from a server that gives log-probabilities, else a text of a few tokens."""
        if self._probabilities is not False:
            try:
                reply = await ask(question, logprobs=True, top_logprobs=TOP)
                why = "gives no log-probabilities"
            except Failed as failure:
                if failure.status not in (400, 422) or "logprobs" not in str(failure):
                    raise
                reply, why = None, f"refuses log-probabilities ({failure})"
            if reply and reply.top is not None and self._probabilities is not False:
                self._probabilities = True
                return reply
            if self._probabilities:  # a run must not change its reward
                raise Failed(f"{self.client.url} {why} any more", passing=False)
            if self._probabilities is None:
                self._probabilities = False
                log.warning(
                    "%s: %s %s; answers count as 1 or 0. Serve the judge with vLLM or SGLang for finer values.",
                    self.name,
                    self.client.url,
                    self.client.clean(why),
                )
        return await ask(question, max_tokens=16)


def _bare(token: str) -> str:
    return token.strip(" \t\n▁Ġ")  # the last two are how some servers write a leading space


def yes_and_no(top: Mapping[str, float]) -> tuple[float, float]:
    """P(yes) and P(no), each summed over case and leading-space variants; raises `Failed` without either.

    top: token -> probability of the likeliest first tokens.
    """
    yes, no = (sum(p for token, p in top.items() if _bare(token).lower() == word) for word in ("yes", "no"))
    if not yes + no > 0:
        raise Failed(f"neither yes nor no is among the likeliest first tokens {list(top)[:5]}", passing=False)
    return yes, no


class VQAScore(_OneWord):
    """P(yes) to 'Does this figure show "{prompt}"? Please answer yes or no.' (Lin et al. 2024), in [0, 1].

    p_yes / (p_yes + p_no) of the first token, any spelling; details["yes_or_no"] is p_yes + p_no. The original instead
    asks CLIP-FlanT5, an encoder-decoder fine-tuned for it, and takes exp(-mean cross entropy) of the answer "Yes",
    without comparing it with "No": the two are not on one scale. Without log-probabilities: 1 for yes, 0 for no.
    """

    name = "vqascore"
    template = 'Does this figure show "{prompt}"? Please answer yes or no.'

    async def __call__(self, images: Tensor, prompts: Sequence[str]) -> RewardOutput:
        return await self._score(images, self._judge, prompts)

    async def _judge(self, ask: Ask, prompt: str) -> Found:
        reply = await self._answer(ask, self.template.replace("{prompt}", prompt))
        if reply.top is not None:
            yes, no = yes_and_no(reply.top)
            return yes / (yes + no), {"yes_or_no": yes + no}
        said = re.match(r"\W*(yes|no)\b", reply.text, re.IGNORECASE)
        if not said:
            raise Failed(f"the reply is neither yes nor no: {reply.text[:100]!r}", passing=False)
        return float(said[1].lower() == "yes"), {}


NUMBERS: list[str] = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty",
)


def spellings(answer: str) -> set[str]:
    """The spellings of an expected one-word answer: as a word, capitalised, and a number in digits too."""
    word = answer.strip().lower()
    if word.isdecimal() and int(word) < len(NUMBERS):
        word = NUMBERS[int(word)]
    digits = {str(NUMBERS.index(word))} if word in NUMBERS else set()
    return {word, word.capitalize()} | digits


def atom_probability(top: Mapping[str, float], answer: str) -> float:
    """The probability that an answer begins as `answer` does, summed over the first tokens of its spellings.

    top: token -> probability of the likeliest first tokens; the answer counts 0 if it is not among them.

    A server does not say how it splits words. So a token counts if it is a spelling, with or without a leading space,
    or the beginning of one ("E" of Eight; "1" of 10 where digits are tokens, as in Qwen), unless it is another number
    word. If a token of several digits is among the likeliest, numbers are whole tokens and "1" is not a beginning of
    10. Each token counts once; the reference adds it once for each spelling that begins with it.
    """
    accepted = spellings(answer)
    whole = any(len(_bare(token)) > 1 and _bare(token).isdecimal() for token in top)

    def counts(token: str) -> bool:
        if token in accepted or not token:
            return bool(token)
        other = whole if token.isdecimal() else token.lower() in NUMBERS
        return not other and any(spelling.startswith(token) for spelling in accepted)

    return min(sum((p for token, p in top.items() if counts(_bare(token))), 0.0), 1.0)


def soft_tifa(atoms: Sequence[float]) -> tuple[float, float]:
    """Arithmetic and geometric mean of a prompt's atom probabilities; a zero makes the second 0."""
    geometric = math.exp(sum(map(math.log, atoms)) / len(atoms)) if min(atoms) > 0 else 0.0
    return sum(atoms) / len(atoms), min(geometric, 1.0)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


class SoftTIFA(_OneWord):
    """GenEval 2's score of an image (Kamath et al. 2025): a mean of the probabilities of the right answers, in [0, 1].

    Asks each question of the column `vqa_list`, a list of [question, answer], for one word and takes
    `atom_probability`. mean: "geometric", the benchmark's headline, or "arithmetic".
    details: "am", "gm" and "atoms", the list of probabilities (the benchmark reports 100 times their averages over
    images). An image with a question that was not answered is invalid. Without log-probabilities an atom is 1 or 0.
    The reference asks Qwen3-VL-8B-Instruct and reads the whole distribution, not its top 20.
    """

    name = "soft_tifa"
    template = "{question} Answer in one word."

    def __init__(
        self,
        server: str | ChatClient,
        template: str | None = None,
        size: int | None = None,
        mean: Literal["geometric", "arithmetic"] = "geometric",
    ):
        super().__init__(server, template, size)
        if mean not in ("geometric", "arithmetic") or "{question}" not in self.template:
            raise ValueError("soft_tifa needs mean 'geometric' or 'arithmetic' and a template with {question}")
        self.mean = mean

    async def __call__(self, images: Tensor, prompts: Sequence[str], *, vqa_list: Sequence) -> RewardOutput:
        for prompt, pairs in zip(prompts, vqa_list, strict=True):
            if not (isinstance(pairs, list | tuple) and pairs and all(map(_is_pair, pairs))):
                raise ValueError(f"vqa_list must hold [question, answer] texts, for {prompt!r} it is {pairs!r}")
        return await self._score(images, self._judge, vqa_list)

    async def _judge(self, ask: Ask, pairs: Sequence[tuple[str, str]]) -> Found:
        atoms = await together([self._atom(ask, *pair) for pair in pairs])
        am, gm = soft_tifa(atoms)
        return gm if self.mean == "geometric" else am, {"am": am, "gm": gm, "atoms": atoms}

    async def _atom(self, ask: Ask, question: str, answer: str) -> float:
        reply = await self._answer(ask, self.template.replace("{question}", question))
        if reply.top is not None:
            return atom_probability(reply.top, answer)
        said = re.match(r"\W*(\w+)", reply.text)
        return float(bool(said) and said[1].lower() in {spelling.lower() for spelling in spellings(answer)})

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        images, prompts, _ = super().known_pair()
        return images, prompts, {"vqa_list": [[["Is the circle red?", "Yes"]]] * 2}
