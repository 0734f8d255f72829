"""A target's generation_config.json: what is served, what is refused by name, and what requests say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coppice.errors import InvalidField
from services.verifier.worker import repetition_penalty
from tests.processes import StartService
from tests.sessions import described
from tests.tiny import make_target

SERVED = {
    "nothing": ({}, 1.0),
    "a repetition penalty": ({"repetition_penalty": 1.05}, 1.05),
    "sampling": ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}, 1.0),
    "neutral values": ({"no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": [], "min_length": 0}, 1.0),
    "ids and lengths": ({"eos_token_id": [0, 2], "pad_token_id": 0, "max_length": 99, "max_new_tokens": 9}, 1.0),
    "another program's fields": ({"chat_format": "chatml", "max_window_size": 6144}, 1.0),
}
UNSERVED: dict[str, Any] = {
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "bad_words_ids": [[5]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 0,
    "min_length": 5,
    "min_new_tokens": 5,
    "num_beams": 4,
    "exponential_decay_length_penalty": [5, 1.1],
    "sequence_bias": [[[5], 1.0]],
    "guidance_scale": 1.5,
    "stop_strings": ["end"],
    "token_healing": True,
    "dola_layers": "high",
}


def folder(path: Path, told: dict[str, Any], name: str = "generation_config.json") -> Path:
    (path / name).write_text(json.dumps(told), encoding="utf-8")
    return path


@pytest.mark.parametrize("case", SERVED)
def test_what_is_served_or_a_requests_business_loads(tmp_path: Path, case: str) -> None:
    told, penalty = SERVED[case]
    assert repetition_penalty(folder(tmp_path, told), "serve") == penalty


@pytest.mark.parametrize("field", UNSERVED)
def test_what_changes_greedy_decoding_and_is_not_served_is_refused_by_name(tmp_path: Path, field: str) -> None:
    target = folder(tmp_path, {field: UNSERVED[field], "repetition_penalty": 1.3})
    with pytest.raises(InvalidField, match=rf"sets {field}, which is not served"):
        repetition_penalty(target, "serve")
    assert repetition_penalty(target, "ignore") == 1.0


def test_fields_of_an_older_folders_config_count_too(tmp_path: Path) -> None:
    model = {"model_type": "llama", "repetition_penalty": 1.2}
    assert repetition_penalty(folder(tmp_path, model, "config.json"), "serve") == 1.2


def test_a_penalty_out_of_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="repetition_penalty 1000"):
        repetition_penalty(folder(tmp_path, {"repetition_penalty": 1000.0}), "serve")


async def test_an_ignored_file_is_not_in_the_way(tmp_path: Path, start_service: StartService) -> None:
    target = make_target(tmp_path, tokenizer=False)
    folder(target, {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3, "eos_token_id": 7})
    flags = ("--verifier.target", str(target), "--verifier.generation_config", "ignore", "--verifier.prune", "false")
    told = await described(start_service("services.verifier", *flags))
    assert (told.repetition_penalty, list(told.eos_ids)) == (1.0, [7])
