"""What the target says without Coppice: transformers' `generate`, and the verdict on an answer that differs from it.

Needs the `serve` extra; torch and transformers are imported when they are needed, on the thread that will use them.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coppice.client.completion import Completion
from coppice.config.model import read_tokenizer
from coppice.speculation.sampling import Penalties, SamplingParams, decode_row, draw, noise
from coppice.wire.generation import Origin

if TYPE_CHECKING:
    from coppice.engine.engine import Context

Ids = tuple[int, ...]
Asked = Sequence[tuple[Ids, SamplingParams]]
Verdict = Literal["identical", "tie", "wrong"]
# How far an emitted token may lie below the best one and still be a tie, in logits at temperature 1. In bfloat16 a
# row's logits depend on how many rows are computed together and on where its keys lie: on a CPU with AMX one row's
# moved by 1.2 between transformers' own ways to compute it. What decides moves less. Of 34,128 decisions that
# transformers made row by row or 13 at once, 385 were others than in one forward over the text, by at most 0.185; of
# some 50,000 at T = 1 two were, by 0.423 and 0.533. In float32 nothing may differ: a tie there is reported, and fails.
EPS = 0.8
_SAMPLED_ONLY = ("temperature", "top_k", "top_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


class TargetText:
    """What turns texts into a target's ids, as transformers does; known before any weight is loaded."""

    def __init__(self, target: Path) -> None:
        """Read nothing yet."""
        self._target = target

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be encoded."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self.has_tokenizer and bool(self._chat.chat_template)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._config.vocab_size)

    def context(self, kv_tokens: int) -> "Context":
        """How long a text may be that a verifier with so many KV tokens serves."""
        from coppice.engine.engine import Context

        return Context.of(self._config, kv_tokens).served(kv_tokens)

    def encode(self, text: str, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a text, as the tokenizer alone gives them, or of a user's message in the chat template."""
        if chat:
            turns = [{"role": "user", "content": text}]
            text = self._chat.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return tuple(self._tokenizer.encode(text, add_special_tokens=not chat).ids)

    @cached_property
    def _chat(self) -> Any:
        return import_module("transformers").AutoTokenizer.from_pretrained(self._target, local_files_only=True)

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._target)

    @cached_property
    def _config(self) -> Any:
        load = import_module("transformers").AutoConfig.from_pretrained
        return load(self._target, local_files_only=True, trust_remote_code=False).get_text_config()


class Reference:
    """The target in plain transformers, stock attention."""

    def __init__(self, target: Path, dtype: str, device: str = "cpu", threads: int = 0) -> None:
        """Load it; `threads` 0 lets torch choose."""
        import torch

        if threads:
            torch.set_num_threads(threads)
        self._torch, self.text = torch, TargetText(target)
        transformers: Any = import_module("transformers")
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()  # it warns of its own calls
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(target, dtype=getattr(torch, dtype), local_files_only=True).to(device).eval()
        # What a folder's own configuration changes in greedy decoding stays. A request says how it is sampled and how
        # long it is; None for an id means that nothing ends or pads the text.
        unset = ("eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "min_p", *_SAMPLED_ONLY)
        self._model.generation_config.update(do_sample=False, **dict.fromkeys(unset))

    def greedy(self, ids: Sequence[int], max_new_tokens: int) -> Completion:
        """`generate(do_sample=False)` of exactly `max_new_tokens`, end-of-text ids included like any other."""
        return self.generate(ids, max_new_tokens, SamplingParams())

    def generate(self, ids: Sequence[int], max_new_tokens: int, sampling: SamplingParams, **options: Any) -> Completion:
        """`generate` of exactly `max_new_tokens`, sampled at T > 0 with torch's own noise from the seed.

        A step is a forward behind the prefill, whose own token is not counted as decoded. `generate` knows of a bias
        and the repetition penalty alone. `options` are its own, such as of its cache.
        """
        torch, heard = self._torch, list[tuple[float, int]]()  # when the prompt and what each forward made came
        streamer = SimpleNamespace(put=lambda ids: heard.append((time.perf_counter(), ids.numel())), end=lambda: None)
        if sampling.repetition_penalty is not None:
            options["repetition_penalty"] = sampling.repetition_penalty
        if sampling.logit_bias:
            options["sequence_bias"] = {(token,): bias for token, bias in sampling.logit_bias.items()}
        if sampling.temperature > 0:
            torch.manual_seed(sampling.seed)
            options |= {"do_sample": True, **sampling.model_dump(include={"temperature", "top_k", "top_p", "min_p"})}
        prompt = torch.tensor([list(ids)], device=self._model.device)
        called = time.perf_counter()
        output = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, streamer=streamer, **options
        )
        first, last = heard[1][0], heard[-1][0]
        new, counts = tuple(output[0, len(ids) :].tolist()), [count for _, count in heard[2:]]
        return Completion(
            ids=new,
            origins=(Origin.ROOT,) * len(new),
            finish_reason="length",
            prompt_tokens=len(ids),
            new_tokens=len(new),
            accept_lengths=counts,
            routed=[-1] * len(counts),
            verified_nodes=[0] * len(counts),
            seed=sampling.seed,
            ttft_s=first - called,
            decode_s=last - first,
        )

    def judge(
        self, prompt: Sequence[int], ids: Sequence[int], sampling: SamplingParams, expected: Sequence[int] | None = None
    ) -> Verdict:
        """Whether an answer is what the target says: it is if it equals `expected`.

        Otherwise one plain forward over prompt + answer re-scores it: "identical" only without `expected` when every
        token is the row's own (greedy: the argmax, else with the same noise), "tie" when each is within EPS of it.
        """
        if expected is not None and tuple(ids) == tuple(expected):
            return "identical"
        rows: NDArray[np.float32] = self._rows(prompt, ids).numpy()
        sampling = sampling.with_defaults(self._model.generation_config.repetition_penalty or 1.0)
        penalties = Penalties(sampling, len(prompt), rows.shape[1])
        if penalties.change_rows:
            penalties.append(prompt)
            rows = np.stack([penalties.adjusted(row, ids[:number]) for number, row in enumerate(rows)])
        verdicts = {
            judge_token(row, token, sampling, position)
            for position, (row, token) in enumerate(zip(rows, ids, strict=True), start=len(prompt))
        }
        if "wrong" in verdicts:
            return "wrong"
        return "tie" if "tie" in verdicts or expected is not None else "identical"

    def judge_all(
        self, asked: Asked, answers: Mapping[str, Sequence[Completion]], own: Sequence[Ids] | None = None
    ) -> dict[str, list[Verdict]]:
        """A verdict on every answer of every way: against `own`, else against the first way's, which are re-scored."""
        first = next(iter(answers))
        expected = own or [answer.ids for answer in answers[first]]
        return {
            way: [
                self.judge(prompt, answer.ids, sampling, None if own is None and way == first else ids)
                for (prompt, sampling), answer, ids in zip(asked, its, expected, strict=True)
            ]
            for way, its in answers.items()
        }

    def redraw(self, prompt: Sequence[int], ids: Sequence[int], sampling: SamplingParams) -> tuple[list[int], float]:
        """What one plain forward over prompt + answer draws at each position of the answer, and the least margin.

        Nothing of Coppice's but the keyed noise takes part: temperature, top-k and top-p are transformers' own. The
        margin is how far, in logits, the best token lies above the second: rounding decides where it is tiny.
        """
        scores, temperature = self._rows(prompt, ids).double(), sampling.temperature or 1.0
        if sampling.temperature:
            warpers: Any = import_module("transformers.generation.logits_process")
            chain = [warpers.TemperatureLogitsWarper(temperature)]
            chain += [warpers.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
            chain += [warpers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
            for warper in chain:
                scores = warper(None, scores)
            every = np.arange(scores.shape[1])
            drawn_with = [noise(sampling.seed, len(prompt) + at, every) for at in range(len(ids))]
            scores = scores + self._torch.from_numpy(np.stack(drawn_with))
        best, second = scores.topk(2).values.unbind(-1)
        return scores.argmax(-1).tolist(), float((best - second).min()) * temperature

    def _rows(self, prompt: Sequence[int], ids: Sequence[int]) -> Any:
        """(n, V) float32 logits on the CPU of one plain forward, a row for each token of the answer."""
        with self._torch.inference_mode():
            text = self._torch.tensor([[*prompt, *ids]], device=self._model.device)
            return self._model(text, logits_to_keep=len(ids) + 1).logits[0, :-1].float().cpu()


def judge_token(row: NDArray[np.float32], token: int, sampling: SamplingParams, position: int) -> Verdict:
    """Whether `token` is what `sampling` draws from a (V,) row of logits at an absolute position, up to EPS.

    Rounding also moves ids across the edges of top-k and top-p. A tie must lie in the widest support that EPS allows,
    and within EPS of the best of the narrowest.
    """
    if sampling.temperature == 0:
        gap = float(row.max() - row[token])
        return "identical" if int(row.argmax()) == token else "tie" if gap <= EPS else "wrong"
    if draw(*decode_row(row, sampling), sampling.seed, position) == token:
        return "identical"
    slack = EPS / sampling.temperature
    widest, _ = decode_row(row, _with_odds(sampling, slack))
    if row[token] < row[widest].min() - EPS:
        return "wrong"
    kept, _ = decode_row(row, _with_odds(sampling, -slack))
    if kept.size < row.size:
        kept = kept[row[kept] > row[kept].min() + EPS]

    def scores(ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return row[ids] / sampling.temperature + noise(sampling.seed, position, ids)

    return "tie" if scores(np.array([token]))[0] >= scores(kept).max(initial=-np.inf) - slack else "wrong"


def _with_odds(sampling: SamplingParams, slack: float) -> SamplingParams:
    """The same with top_p where it would be if the odds of every id were e^slack times what they are."""
    odds = sampling.top_p * math.exp(slack)
    return sampling.model_copy(update={"top_p": odds / (odds + 1 - sampling.top_p)})
