"""The chunked loss against full logits: time of forward and backward, and peak memory on a GPU.

    python benchmarks/loss.py            # the CPU, or the GPU if there is one

One GPT-2 block on 1,024 tokens, bf16, in turns; medians. `model.loss: auto` takes the chunked loss
on GPUs in 16 bit, for its memory, and full logits on the CPU, for their speed.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from recipes.config import Model
from recipes.model import SummedLoss, build_network, chunked_obstacle

ROUNDS = 7


def once(module: SummedLoss, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Milliseconds of one forward and backward."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    loss, _ = module(ids, labels)
    loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1000


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"\n{device.type}, torch {torch.__version__}\n")
    print("| vocabulary | full ms | chunked ms | chunked / full | peak full / chunked MiB |")
    print("|--:|--:|--:|--:|--:|")
    for vocabulary in (4096, 16384, 50257):
        config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 256, "n_head": 4}
        config |= {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
        network = build_network(Model(config=config), 0, 1024, vocabulary).to(device)
        if obstacle := chunked_obstacle(network):
            raise SystemExit(obstacle)
        network = network.bfloat16()
        ids = torch.randint(0, vocabulary, (1, 1024), device=device)
        times: dict[bool, list[float]] = {False: [], True: []}
        peaks = {False: 0.0, True: 0.0}
        for _ in range(ROUNDS):
            for chunked, values in times.items():
                if ids.is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                values.append(once(SummedLoss(network, chunked), ids, ids))
                if ids.is_cuda:
                    peaks[chunked] = torch.cuda.max_memory_allocated() / 2**20
        full, chunked_ms = median(times[False][1:]), median(times[True][1:])
        memory = f"{peaks[False]:.0f} / {peaks[True]:.0f}" if ids.is_cuda else "-"
        print(
            f"| {vocabulary} | {full:.0f} | {chunked_ms:.0f} | {chunked_ms / full:.2f} | {memory} |"
        )


if __name__ == "__main__":
    main()
