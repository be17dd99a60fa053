"""Folders and files as one node sees them: the run folder, the data, locks of extension builds."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import psutil

MIB = 1 << 20
WRITE_BYTES, WRITE_S = 64 * MIB, 0.5  # the write test ends at whichever comes first


def token_name(name: str, host: str) -> str:
    """A node's token in the run folder; `--fresh` takes `.partial` files for ours."""
    return f".preflight-{name}-{host}.partial"


def enter(folder: Path, name: str, host: str) -> dict[str, Any]:
    """Make the run folder, leave this node's token in it and write as fast as it goes."""
    made: list[str] = []
    facts: dict[str, Any] = {"path": str(folder), "made": made}
    try:
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                path.mkdir(exist_ok=True)  # another node may be faster
                made.append(str(path))
        facts |= _space(folder)
        (folder / token_name(name, host)).write_text(name, encoding="utf-8")
        facts["bytes_per_s"] = _write(folder, name, host, facts["free_bytes"])
        facts["checkpoints"] = len(list((folder / "checkpoints").glob("step-*")))
    except OSError as error:
        place = str(error.filename or folder)
        why = str(error.strerror or error)
        facts["error"] = why if place.startswith(str(folder)) else f"{why}: {place}"
    return facts


def _space(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    place, mounts = folder.resolve(), psutil.disk_partitions(all=True)
    # The deepest mount point; of several mounts on one, the last lies on top.
    around = [mount for mount in mounts if place.is_relative_to(mount.mountpoint)]
    around.sort(key=lambda mount: len(mount.mountpoint))
    kind = f"{around[-1].fstype} on {around[-1].mountpoint}" if around else "unknown"
    return {"free_bytes": usage.free, "filesystem": kind}


def _write(folder: Path, name: str, host: str, free: int) -> float:
    """Bytes per second to the disk, not to the page cache; all nodes write at once, as in a run."""
    path = folder / f"speed-{token_name(name, host)}"
    piece = os.urandom(MIB)  # some file systems store zeros for nothing
    limit = min(WRITE_BYTES, free // 8)
    written, start = 0, time.perf_counter()
    try:
        with path.open("wb") as file:
            while written < limit and time.perf_counter() - start < WRITE_S:
                written += file.write(piece[: limit - written])
            file.flush()
            os.fsync(file.fileno())
        return written / (time.perf_counter() - start)
    finally:
        with suppress(OSError):
            path.unlink()


def look(folder: Path, name: str, hosts: list[str], limit_s: float = 2.0) -> list[str]:
    """Hosts whose token is seen here; network file systems are given a moment."""
    end = time.monotonic() + limit_s
    while True:
        seen = [host for host in hosts if _holds(folder / token_name(name, host), name)]
        if len(seen) == len(hosts) or time.monotonic() > end:
            return seen
        time.sleep(0.2)


def _holds(path: Path, text: str) -> bool:
    try:  # opening asks the server; a listing may come from a cache
        return path.read_text(encoding="utf-8") == text
    except OSError:
        return False


def leave(folder: Path, name: str, host: str, made: list[str]) -> None:
    """Remove this node's token and the folders that were made for it."""
    with suppress(OSError):
        (folder / token_name(name, host)).unlink()
    for path in reversed(made):
        with suppress(OSError):  # another node's token is still there, or a run has begun
            Path(path).rmdir()


def extension_locks(root: Path) -> list[dict[str, Any]]:
    """Locks of torch's extension builds, with whether a process of this node holds them open."""
    locks: list[Path] = []
    with suppress(OSError):  # somebody else's, and closed: torch won't build there
        locks = [path for path in root.glob("**/lock") if path.is_file()]
    held = _open_files({str(path.resolve()) for path in locks}) if locks else set()
    found = []
    for path in locks:
        with suppress(OSError):  # gone meanwhile
            age = time.time() - path.stat().st_mtime
            found.append({"path": str(path), "age_s": age, "held": str(path.resolve()) in held})
    return found


def _open_files(wanted: set[str]) -> set[str]:
    """Those of the files that some process has open: torch's builder does as long as it lives."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # ended meanwhile, or another user's
            for entry in process.iterdir():
                with suppress(OSError):
                    found.add(str(entry.readlink()))
    return found & wanted


def extension_root(environ: dict[str, str]) -> Path:
    """Where torch builds its extensions."""
    given = environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def data_facts(data: dict[str, Any], environ: dict[str, str]) -> list[dict[str, Any]]:
    """What the run file's data section names, as this node sees it.

    Args:
        data: the section, with absolute paths.
    """
    local = fsspec.filesystem("file")  # reads patterns as the recipe does
    if data["kind"] == "hub":
        return [_reached(environ)]
    if data["kind"] == "python_stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        sources = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
        return [_counted(str(root), sources)]
    if data["kind"] == "saved":
        return [_counted(data["path"], Path(data["path"]).rglob("*"))]
    return [
        {"what": pattern, "unread": "remote; the run's start opens it"}
        if "://" in pattern
        else _counted(pattern, map(Path, local.glob(pattern)))
        for pattern in data["files"]
    ]


def _counted(what: str, paths: Iterable[Path]) -> dict[str, Any]:
    """Number and bytes of the files among paths, and a digest of names and sizes."""
    count, total, digest = 0, 0, hashlib.sha256()
    try:
        for path in sorted(paths):
            if path.is_file():
                length = path.stat().st_size
                count, total = count + 1, total + length
                digest.update(f"{path} {length}\n".encode())
    except OSError as error:
        return {"what": what, "error": str(error.strerror or error)}
    return {"what": what, "count": count, "bytes": total, "digest": digest.hexdigest()[:12]}


def _reached(environ: dict[str, str]) -> dict[str, Any]:
    """Whether the hub, or the proxy on the way to it, takes a connection."""
    place = environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return {"what": place, "unread": "HF_HUB_OFFLINE is set"}
    way = environ.get("https_proxy") or environ.get("HTTPS_PROXY") or place
    try:
        url = urlsplit(way if "://" in way else f"http://{way}")
        port = url.port or (443 if url.scheme == "https" else 80)
        what = f"{url.scheme}://{url.hostname}:{port}"  # a proxy's may hold a password
        socket.create_connection((str(url.hostname), port), timeout=3.0).close()
    except ValueError as error:
        return {"what": "HF_ENDPOINT or https_proxy", "unreached": str(error)}
    except OSError as error:
        return {"what": what, "unreached": str(error.strerror or error)}
    return {"what": what, "reached": True}
