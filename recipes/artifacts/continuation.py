"""What a model writes after a prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from recipes.data.tokens import Encoder


def continue_text(
    network: Any,
    encoder: Encoder,
    prompt: str,
    *,
    tokens: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
    greedy: bool = False,
) -> str:
    """The prompt and up to `tokens` tokens after it, ended by the end-of-text token.

    Nothing but these settings counts, whatever the model brings along (top-p, penalties). The state
    of the default random generators is left as it was; `greedy` draws nothing and takes the
    likeliest token each time.
    """
    ids = torch.tensor([encoder.encode_prompt(prompt)], device=device)
    settings = GenerationConfig(max_new_tokens=tokens, use_cache=True)
    settings.pad_token_id = settings.eos_token_id = encoder.eot
    if not greedy:
        settings.do_sample, settings.temperature, settings.top_k = True, temperature, top_k
    devices = [device] if device.type == "cuda" else []
    network.eval()
    # generate() fills up from the model's own what the given settings leave open.
    own, network.generation_config = network.generation_config, settings
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            out = network.generate(ids, attention_mask=torch.ones_like(ids))
    finally:
        network.generation_config = own
    return encoder.decode(out[0].tolist())


def check_prompt(encoder: Encoder, prompt: str, tokens: int, positions: int | None) -> None:
    """Refuse a prompt that can't be continued by so many tokens.

    Raises:
        ValueError: it is no text or has no token, or it exceeds the model's positions with its
            continuation.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt is not in the terminal's encoding, UTF-8")
    count = len(encoder.encode_prompt(prompt))
    if not count:
        raise ValueError("the prompt is empty: give at least one character to go on from")
    if positions is not None and count + tokens > positions:
        room = positions - count
        remedy = f"ask for {room} tokens or fewer" if room > 0 else "shorten the prompt"
        raise ValueError(
            f"the prompt has {count} tokens and --tokens is {tokens}: together {count + tokens}, "
            f"the model takes {positions}; {remedy}"
        )
