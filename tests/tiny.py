"""A tiny corpus and run file: everything the main job has, at a size that trains in seconds."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

RUN = """
name: tiny
model:
  config:
    model_type: gpt2
    n_layer: 2
    n_embd: 32
    n_head: 2
    n_positions: 32
    vocab_size: 512
    activation_function: gelu_pytorch_tanh
    resid_pdrop: 0.1
    embd_pdrop: 0.1
    attn_pdrop: 0.0
    bos_token_id: 0
    eos_token_id: 0
data:
  kind: files
  format: parquet
  files: ["{corpus}/*.parquet"]
  tokenizer: {{train_vocab_size: 512, train_documents: 50}}
  held_out: {{share: 0.1}}
  lanes: 8
  block_rows: 4
  prefetch: 16
batch: {{seq_len: 32, global_sequences: 16, micro: 2}}
optim: {{lr: 0.01}}
schedule: {{updates: 8, warmup_updates: 3}}
checkpoint: {{every_updates: 100}}
evaluate: {{every_updates: 4, sequences: 16}}
sample: {{prompt: "def ", tokens: 8}}
log: {{every_updates: 1}}
"""


def write_corpus(folder: Path, documents: int = 160, files: int = 2, rows: int = 4) -> Path:
    """Parquet files of short documents cut from the standard library, `rows` to a row group."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    pieces = [text[i * 700 : i * 700 + 100 + (i * 37) % 600] for i in range(documents)]
    for k in range(files):
        table = pa.table({"id": list(range(k, documents, files)), "text": pieces[k::files]})
        pq.write_table(table, folder / f"part-{k}.parquet", row_group_size=rows)
    return folder


def write_tokenizer(path: Path) -> Path:
    """A tokenizer.json that knows single bytes only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return path


def write_run(folder: Path, corpus: Path) -> Path:
    """The tiny run file."""
    path = folder / "tiny.yaml"
    path.write_text(RUN.format(corpus=corpus), encoding="utf-8")
    return path
