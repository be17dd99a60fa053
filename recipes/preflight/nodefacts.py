"""What one node is and has: JSON request on stdin, JSON facts as the last line of stdout.

    echo '{"round": "facts", "me": "worker-0", "hosts": ["worker-0"]}' | \\
        python -m recipes.preflight.nodefacts

`recipes.preflight.preflight` runs it on every node at once, in rounds that build on each other:
`facts` (everything that a node can say by itself; leaves a token in the run folder), `meet` (every
node listens and connects to all others; looks for their tokens) and `leave` (cleans up). On the
first node alone `parameters` counts the model's parameters. Nothing but that imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from recipes.cluster.environment import foreign_deepspeed_env
from recipes.config import Model
from recipes.preflight import diskfacts, netfacts
from recipes.preflight.gpus import read_gpus

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("torch", "deepspeed", "accelerate", "transformers", "datasets", "tokenizers", "numpy"),
    *("safetensors", "pydantic", "psutil", "rich", "nvidia-ml-py"),
)


def packages() -> dict[str, str]:
    """Versions by the installed metadata, so that nothing heavy is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    # NCCL comes with torch as a package of its own, named after the CUDA that it is for.
    nccl = [
        f"{dist.metadata['Name'].removeprefix('nvidia-nccl-')} {dist.version}"
        for dist in importlib.metadata.distributions()
        if str(dist.metadata["Name"]).startswith("nvidia-nccl")
    ]
    return found | {"nccl": ", ".join(sorted(nccl)) or "none"}


def commit(folder: Path = ROOT) -> str:
    """The checkout's commit, with a mark for changes; empty without git or without a checkout."""
    if not (folder / ".git").exists():
        return ""  # git would look further up
    words = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def sources(folder: Path = ROOT) -> str:
    """A hash of our own modules, which tells two checkouts apart without git."""
    digest = hashlib.sha256()
    for path in sorted((folder / "recipes").rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {file_hash(path)}\n".encode())
    return digest.hexdigest()[:12]


def file_hash(path: Path) -> str:
    """A short hash of a file's contents, or why it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return str(error.strerror or error)


def limits() -> dict[str, int]:
    """Soft limits; -1 is unlimited."""
    return {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def memory() -> dict[str, int]:
    """Host memory and /dev/shm, in bytes."""
    main = psutil.virtual_memory()
    found = {"total": main.total, "available": main.available}
    shm = Path("/dev/shm")
    if shm.is_dir():
        found["shm_free"] = shutil.disk_usage(shm).free
    return found


def machine() -> str:
    """Equal on two hosts only if they are one machine: containers have a network of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()}-{Path('/proc/self/ns/net').stat().st_ino}"


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that this node can say by itself.

    Args:
        request: `me`, `hosts`; and where asked for: `id` and `folder` (the run folder), `port` (on
            the first node), `files` (to be equal everywhere), `data` (the run file's section),
            `environ` (what the job's ranks will get), `working_dir`.
    """
    environ = request.get("environ", {})  # ranks get nothing of this session's own
    found: dict[str, Any] = {
        "hostname": socket.gethostname(),
        "machine": machine(),
        "python": {"path": sys.executable, "version": sys.version.split()[0]},
        "packages": packages(),
        "commit": commit(),
        "sources": sources(),
        "files": {path: file_hash(Path(path)) for path in request.get("files", [])},
        "commands": {
            name: shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            for name in ("pdsh", "accelerate", "deepspeed", "torchrun")
        },
        "gpus": read_gpus(),
        "limits": limits(),
        "memory": memory(),
        "locks": diskfacts.extension_locks(diskfacts.extension_root(environ)),
        "network": netfacts.network_facts(request["hosts"]),
    }
    if request.get("port") is not None:
        found["port"] = netfacts.port_fact(request["port"])
    if request.get("working_dir"):
        folders = [Path(request["working_dir"]), Path.home()]
        found["deepspeed_env"] = foreign_deepspeed_env(folders)
    if request.get("folder"):
        folder = Path(request["folder"])
        found["folder"] = diskfacts.enter(folder, request["id"], request["me"])
    if request.get("data"):
        found["data"] = diskfacts.data_facts(request["data"], environ)
    return found | {"time": time.time()}


def meet(request: dict[str, Any]) -> dict[str, Any]:
    """Connections in both directions between all nodes, clocks, and the others' tokens."""
    found = netfacts.meet(request)
    if request.get("folder"):
        folder = Path(request["folder"])
        found["seen"] = diskfacts.look(folder, request["id"], request["tokens"])
    return found


def leave(request: dict[str, Any]) -> dict[str, Any]:
    """Remove what `facts` left in the run folder."""
    diskfacts.leave(Path(request["folder"]), request["id"], request["me"], request["made"])
    return {}


def model_facts(settings: Model, seq_len: int) -> tuple[int, float]:
    """Parameters and FLOPs per token of a run file's model, without its weights.

    Raises:
        ValueError: the model can't be built.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.model import build_network, count_parameters, flops_per_token

    with torch.device("meta"):
        if settings.pretrained is None:
            # The attention kind does not change the count, and may need a GPU.
            settings = settings.model_copy(update={"attention": "eager"})
            network = build_network(settings, 0, seq_len, vocab_size=0)
        else:  # its shape is enough; the weights would be gigabytes
            name, revision = settings.pretrained, settings.revision or "main"
            try:
                config = AutoConfig.from_pretrained(name, revision=revision)
            except OSError as error:
                raise ValueError(f"model.pretrained={name!r}: {error}") from error
            network = AutoModelForCausalLM.from_config(config)
    return count_parameters(network), flops_per_token(network, seq_len)


def parameters(request: dict[str, Any]) -> dict[str, Any]:
    """The number of parameters of the run file's model, or why it can't be built."""
    try:
        settings = Model.model_validate(request["model"])
        return {"count": model_facts(settings, request["seq_len"])[0]}
    except ValueError as error:
        return {"error": str(error)}


ROUNDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "facts": facts,
    "meet": meet,
    "leave": leave,
    "parameters": parameters,
}


def main() -> int:
    """Answer one request."""
    # A name server that is not there must not hold up everything else for half a minute.
    os.environ.setdefault("RES_OPTIONS", "timeout:2 attempts:1")
    request = json.loads(sys.stdin.read())
    answer = ROUNDS[request["round"]](request)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
