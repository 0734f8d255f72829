"""A tiny random target with a byte-level tokenizer: everything a model folder needs, made in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedTokenizerFast

END_OF_TEXT = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def make_target(
    folder: Path,
    vocab: int = 300,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    max_len: int = 512,
    tokenizer: bool = True,
    chat: bool = True,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    gemma: bool = False,
) -> Path:
    """Write a random Llama with `vocab` logits into `folder` and return it. Id 0 ends a text, 1 to 256 are bytes.

    With a `window` it is a Mistral, whose rows see so many positions; a `gemma` turns positions by kinds of layers.

    Weights are larger than a fresh model's, so that its rows have a clear best token and its text does not stand still.
    """
    shape = {"sliding_window": window or 64, "head_dim": 8} if window or gemma else {}
    config = (Gemma3TextConfig if gemma else MistralConfig if window else LlamaConfig)(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **shape,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    if tokenizer:
        make_tokenizer(folder, max_len, CHAT_TEMPLATE if chat else None)
    return folder


def make_tokenizer(folder: Path, max_len: int, chat_template: str | None) -> None:
    """Write the byte-level tokenizer: one id a byte, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {END_OF_TEXT: 0, **{sign: number for number, sign in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
