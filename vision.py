"""Vision: an agent that looks at the game instead of reading it (paper A trains InternVL3.5-8B on FrozenLake).

    python budgetmix.py --env frozenlake --model OpenGVLab/InternVL3_5-8B-HF --observation image

The chat message of a turn holds one picture, drawn by the environment, in place of the observation's text. Any Hugging
Face image-text-to-text model can look at it: its processor turns the picture into tensors and widens its placeholder in
the prompt to as many tokens as the model needs. From there on nothing is new: ids in, ids out, and the loss is taken over
the response. Two things differ from text:

- some models work out the positions themselves (an image has two dimensions) and, when they decode token by token, carry
  them along. So sampling goes through `model.generate` here, with a recorder for the log-probs, and each prompt is
  computed as often as it is sampled from;
- LoRA is on the language part alone (`engine.lora_config`).

Earlier turns (--history) are shown without their pictures. Left out on purpose: vLLM with pictures.
"""

from io import BytesIO
from typing import Any

import torch
from PIL import Image
from transformers import GenerationConfig, LogitsProcessor

from chat import Codec, Completion, Prompt, Sampling, Sight
from engine import HFEngine, Sample, end_tokens, model_inputs, token_logprobs


class VisionCodec(Codec):
    """Chats with pictures <-> ids and tensors, for one processor."""

    remembered = 256  # a picture is megabytes of numbers

    def __init__(self, processor, ends=(), thinking: bool = False):
        self.processor = processor
        # Tensors by the pictures they were made of: prompts that show the same share the memory.
        self.pixels: dict[tuple[bytes, ...], dict[str, torch.Tensor]] = {}
        super().__init__(processor.tokenizer, ends, thinking, template=processor)

    def encode(self, messages: list[dict[str, Any]]) -> Prompt:
        return self._encode(tuple((m["role"], m["content"], m.get("image")) for m in messages))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        parts = [
            {
                "role": m["role"],
                "content": [{"type": "image"}] * ("image" in m) + [{"type": "text", "text": m["content"]}],
            }
            for m in messages
        ]
        return super()._render(parts)

    def _render_and_encode(self, messages: tuple[tuple[str, str, bytes | None], ...]) -> Prompt:
        chat = tuple(
            {"role": role, "content": self._shown(role, content)} | ({"image": image} if image else {})
            for role, content, image in messages
        )
        images = tuple(m["image"] for m in chat if "image" in m)
        shown = {"images": [Image.open(BytesIO(png)).convert("RGB") for png in images]} if images else {}
        # The template has written all special tokens already.
        made = self.processor(text=[self._render(list(chat))], **shown, add_special_tokens=False, return_tensors="pt")
        ids, of_tokens, of_images = made.pop("input_ids"), {}, {}
        made.pop("attention_mask")
        for name, tensor in made.items():
            if tensor.shape == ids.shape:  # which tokens are those of images, say
                of_tokens[name] = tuple(tensor[0].tolist())
            else:
                of_images[name] = tensor
        if len(self.pixels) == self.remembered:  # the oldest
            del self.pixels[next(iter(self.pixels))]
        sight = Sight(self.pixels.setdefault(images, of_images), of_tokens)
        return Prompt(chat, tuple(ids[0].tolist()), sight)


class Recorder(LogitsProcessor):
    """Shapes the distribution that `generate` samples from, and keeps the log-probs of what it sampled."""

    def __init__(self, sampling: Sampling):
        self.sampling, self.logprobs, self.last = sampling, [], None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.note(ids)
        self.last = token_logprobs(scores, self.sampling)
        return self.last

    def note(self, ids: torch.Tensor) -> None:
        """The newest token was sampled from the distribution before."""
        if self.last is not None:
            self.logprobs.append(self.last.gather(1, ids[:, -1:]).squeeze(1))


class VisionEngine(HFEngine):
    """Sampling with Hugging Face from a vision model, the very module that is being trained."""

    def _codec(self, processor, thinking: bool) -> VisionCodec:
        return VisionCodec(processor, end_tokens(self.policy.generation_config), thinking)

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], sampling: Sampling, seed: int) -> list[Completion]:
        """One sampled response per prompt, in order. The end-of-turn token a response was ended with is part of it."""
        # Without top-k and the like: the recorder alone shapes the distribution, and knows it.
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_p=1.0, top_k=0, pad_token_id=self.pad,
            eos_token_id=sorted(self.ends), max_new_tokens=sampling.max_tokens,
        )  # fmt: skip
        completions: list = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))  # like lengths need little padding
        size = min(self.rows, self.prompts)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for batch in (order[i : i + size] for i in range(0, len(order), size)):
                samples = [Sample(prompts[i].ids, (), prompts[i].sight) for i in batch]
                inputs, recorder = model_inputs(samples, self.pad, self.policy), Recorder(sampling)
                ids = self.policy.generate(**inputs, generation_config=config, logits_processor=[recorder])
                recorder.note(ids)
                logprobs, responses = torch.stack(recorder.logprobs, 1).tolist(), ids[:, inputs["input_ids"].shape[1] :]
                for i, response, row in zip(batch, responses.tolist(), logprobs, strict=True):
                    ended = next((at for at, token in enumerate(response) if token in self.ends), None)
                    length = len(response) if ended is None else ended + 1  # behind its end there is padding
                    completions[i] = Completion(tuple(response[:length]), tuple(row[:length]), ended is not None)
        return completions
