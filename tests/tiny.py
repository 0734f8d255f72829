"""A tiny random target with a byte-level tokenizer: everything a model folder needs, made in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedTokenizerFast

from coppice.config.model import MTP_LAYOUTS, text_config

END_OF_TEXT = "<|end|>"
HEADER = """context_length=max_position_embeddings block_count=num_hidden_layers embedding_length=hidden_size
feed_forward_length=intermediate_size rope.dimension_count=head_dim attention.head_count=num_attention_heads
attention.head_count_kv=num_key_value_heads attention.layer_norm_rms_epsilon=rms_norm_eps vocab_size=vocab_size"""
CHAT_TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% for tool in tools or () %}<tool_call> {{ tool.function.name }}
{% endfor %}assistant:"""


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
    with torch.random.fork_rng(devices=[]):
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


def make_gguf(folder: Path, file: Path, kind: str = "Q8_0", **changed: object) -> Path:
    """Write a Llama's folder as llama.cpp does, matrices in blocks of a kind, with a tokenizer that has all bytes.

    changed: fields of the header, by what stands behind their last point; None leaves one out.
    """
    import gguf

    model = AutoModelForCausalLM.from_pretrained(folder)
    config, letters = model.config, "abcdefghijklmnopqrstuvwxyz▁"
    tokens = ["<s>", "</s>", "<unk>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += [f"[{number}]" for number in range(config.vocab_size - len(tokens))]
    fields = {
        f"llama.{name}": getattr(config, ours) for name, _, ours in (pair.partition("=") for pair in HEADER.split())
    }
    fields |= {"llama.rope.freq_base": config.rope_parameters["rope_theta"], "llama.rope.scaling.type": "none"}
    fields |= {"general.architecture": "llama", "split.count": 1, "tokenizer.chat_template": CHAT_TEMPLATE}
    types = [3, 3, 2, 3, *[6] * 256, *[1] * (len(tokens) - 260)]
    for name, value in {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": types}.items():
        fields[f"tokenizer.ggml.{name}"] = value
    fields |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in fields.items():
        if (value := changed.get(name.rpartition(".")[2], field)) is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        part = names.get_name(name.removesuffix(".weight"))
        if part.endswith(("attn_q", "attn_k")):  # its rows alternate between a head's halves
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        block = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        writer.add_tensor(f"{part}.weight", gguf.quantize(tensor.contiguous().numpy(), block), raw_dtype=block)
    plain = float(fields["llama.rope.freq_base"]) ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    if not torch.allclose(factors := plain / model.model.rotary_emb.inv_freq, torch.ones(1)):
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_mtp(folder: Path, layout: str = "Qwen3-Next, Qwen3.5", like: int = -1) -> Path:
    """Ship an MTP head of a layout with a target: a copy of its layer `like` behind a random projection and norms."""
    file, config, names = folder / "model.safetensors", text_config(folder), MTP_LAYOUTS[layout]
    tensors, layers, hidden = load_file(file), config["num_hidden_layers"], config["hidden_size"]
    root, layer = names.root or f"model.layers.{layers}.", f"model.layers.{like % layers}."
    *norms, norm, block = (root + part for part in names.parts)
    head = {block + name.removeprefix(layer): t.clone() for name, t in tensors.items() if name.startswith(layer)}
    noise = torch.Generator().manual_seed(3)
    head |= {f"{part}weight": torch.rand(hidden, generator=noise) + 0.5 for part in (*norms, norm)}
    head[f"{norms[2]}weight"] = torch.randn(hidden, 2 * hidden, generator=noise) / hidden**0.5
    if not names.root:  # as these are published
        for copy in ("embed_tokens", "shared_head.head"):
            head[f"{root}{copy}.weight"] = torch.zeros(config["vocab_size"], hidden)
    save_file(tensors | head, file, {"format": "pt"})
    return folder
