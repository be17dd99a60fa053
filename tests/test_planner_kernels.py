"""The kernels' bytes against the operators that the real models call."""

from __future__ import annotations

import pytest
from operator_bytes import layer_bytes_per_token

from recipes.planner.families import shape_of
from recipes.planner.kernels import Style, layer_moved, loss_bytes

PLAIN = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS = {
    "gpt2, one-kernel gelu": {
        **{"model_type": "gpt2", "n_embd": 512, "n_head": 8},
        **PLAIN,
        "activation_function": "gelu_pytorch_tanh",
    },
    "gpt2, gelu_new": {"model_type": "gpt2", "n_embd": 512, "n_head": 8, **PLAIN},
    "opt": {
        **{"model_type": "opt", "hidden_size": 512, "ffn_dim": 2048, "num_attention_heads": 8},
        **{"word_embed_proj_dim": 512, "dropout": 0.0},
    },
    "llama": {
        **{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    },
    "qwen3": {
        **{"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1376},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    },
}
STYLE = Style(wide=2, narrow=2, fused=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_layers_elementwise_bytes_are_those_of_the_real_operators(name: str) -> None:
    shape = shape_of(MODELS[name], name)
    real = sum(layer_bytes_per_token(MODELS[name], 256, "flash"))
    closed = sum(side.bytes for side in layer_moved(shape, STYLE, 256, "flash"))
    assert closed == pytest.approx(real, rel=0.12)


@pytest.mark.parametrize("name", ["gpt2, one-kernel gelu", "opt", "llama"])
def test_eager_attention_moves_whole_score_matrices(name: str) -> None:
    config = MODELS[name]
    shape, seq_len = shape_of(config, ""), 512
    real = [layer_bytes_per_token(config, seq_len, kind) for kind in ("eager", "flash")]
    closed = [layer_moved(shape, STYLE, seq_len, kind) for kind in ("eager", "flash")]
    extra = sum(real[0]) - sum(real[1])
    planned = sum(s.bytes for s in closed[0]) - sum(s.bytes for s in closed[1])
    # The closed form adds what the four products read and write, which are left out above: a
    # score matrix written and read forward, one written and three read backward, 2 bytes each.
    products = 6 * 2 * shape.heads * seq_len
    assert planned - products == pytest.approx(extra, rel=0.15)


def test_hand_count_of_gpt2() -> None:
    """Norms 2 x 4h, gelu 16h, residual sums 2 x 6h forward."""
    shape = shape_of(MODELS["gpt2, one-kernel gelu"], "")
    forward, _ = layer_moved(shape, STYLE, 256, "flash")
    assert forward.bytes == (8 + 16 + 12) * 512


def test_autocast_and_unfused_gelu_move_more_and_fusing_less() -> None:
    shape = shape_of(MODELS["gpt2, gelu_new"], "")
    sums = [
        sum(side.bytes for side in layer_moved(shape, style, 256, "flash"))
        for style in (
            Style(wide=2, narrow=2, fused=True),
            STYLE,
            Style(wide=4, narrow=2, fused=False),
        )
    ]
    assert sums[0] < sums[1] / 3 and sums[2] > 1.5 * sums[1]


def test_the_loss_moves_its_logits_many_times() -> None:
    # 2 written; 2 + 4 cast; 4 + 4 log-softmax; 12 its gradient; 4 + 2 cast; 2 + 2 read by products
    assert loss_bytes(1000, 2, fused=False) == 38_000
    assert loss_bytes(1000, 2, fused=True) == 12_000
