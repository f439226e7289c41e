#!/usr/bin/env python3
"""Computes probabilities of next tokens with Hugging Face transformers, for the tests of the sampler.

    python xtask/oracle/sampling.py > crates/runtime/tests/sampling/goldens.json

Each case has a generation_config.json, the tokens of prompt and answer, and the probabilities of the tokens that can be drawn,
by the logits processors that `generate` makes, in its order. Presence and frequency penalties, which transformers does not have,
are vLLM's formula. Needs transformers and torch (written with 5.24.0 and 2.15.0).
"""

import json
import math
import types

import torch
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation import GenerationMixin

VOCAB = 96
PROMPT, ANSWER = [5, 9, 9, 17, 40, 41], [9, 60, 61, 60]
HEAT = {"do_sample": True, "top_k": 0}
CASES = [
    {"do_sample": True},
    HEAT | {"temperature": 0.7},
    HEAT | {"top_k": 7, "temperature": 1.3},
    HEAT | {"top_p": 0.8, "temperature": 1.5},
    HEAT | {"min_p": 0.2},
    HEAT | {"min_p": 0.02, "temperature": 2.0},
    HEAT | {"typical_p": 0.3},
    HEAT | {"typical_p": 0.9, "temperature": 0.6},
    HEAT | {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
    HEAT | {"temperature": 1.2, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
    HEAT | {"repetition_penalty": 1.3},
    HEAT | {"repetition_penalty": 0.8, "temperature": 0.5, "top_k": 20},
    HEAT | {"presence_penalty": 1.5},
    HEAT | {"frequency_penalty": -0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2, "top_p": 0.95},
    HEAT | {"sequence_bias": [[[3], 2.5], [[61, 60, 8], 4.0], [[60, 61, 60, 11], 3.0], [[60, 7], -2.0], [[61, 7], 50.0]]},
    HEAT | {"bad_words_ids": [[60, 12], [13], [1], [9, 14]], "suppress_tokens": [20, 21], "eos_token_id": [1, 2]},
    HEAT | {"begin_suppress_tokens": [30, 31]},
    HEAT | {"begin_suppress_tokens": [30, 31], "answer": []},
    HEAT | {"min_new_tokens": 5, "eos_token_id": [1, 2]},
    HEAT | {"min_new_tokens": 4, "eos_token_id": [1, 2]},
    HEAT | {"min_length": 11, "eos_token_id": 1},
    HEAT | {"min_length": 10, "eos_token_id": 1},
]


class AnswerPenalties(LogitsProcessor):
    """vLLM: logits -= frequency_penalty * count + presence_penalty * (count > 0), of tokens of the answer."""

    def __init__(self, presence, frequency, prompt):
        self.presence, self.frequency, self.prompt = presence, frequency, prompt

    def __call__(self, ids, scores):
        counts = torch.bincount(ids[0, self.prompt :], minlength=scores.shape[1]).to(scores.dtype)
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Model(GenerationMixin):
    config = types.SimpleNamespace(is_encoder_decoder=False)


def probabilities(file, logits, answer):
    penalties = AnswerPenalties(file.get("presence_penalty", 0.0), file.get("frequency_penalty", 0.0), len(PROMPT))
    known = {k: v for k, v in file.items() if k not in ("presence_penalty", "frequency_penalty")}
    config = GenerationConfig(**known)
    for key, value in GenerationConfig._get_default_generation_params().items():
        if getattr(config, key, None) is None:
            setattr(config, key, value)
    eos = file.get("eos_token_id")
    config._eos_token_tensor = None if eos is None else torch.tensor(eos if isinstance(eos, list) else [eos])
    ids = torch.tensor([PROMPT + answer])
    processors = Model()._get_logits_processor(
        config, input_ids_seq_length=len(PROMPT), encoder_input_ids=ids, logits_processor=[penalties], device="cpu"
    )
    scores = processors(ids, torch.tensor([logits], dtype=torch.float64))
    return {str(i): float(f"{p:.8g}") for i, p in enumerate(scores.softmax(-1)[0].tolist()) if p > 0}


def main():
    # Of both signs, no two equal.
    logits = [round(4 * math.sin(1.7 * i * i + i) + 0.013 * i, 4) for i in range(VOCAB)]
    cases = []
    for file in CASES:
        file = dict(file)
        answer = file.pop("answer", ANSWER)
        cases.append({"generation_config": file, "answer": answer, "probabilities": probabilities(file, logits, answer)})
    print('{"logits": ' + json.dumps(logits) + ', "prompt": ' + json.dumps(PROMPT) + ', "cases": [')
    print(",\n".join(json.dumps(case) for case in cases) + "\n]}")


main()
