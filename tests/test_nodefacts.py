"""What a node says of itself: for real on this machine; its GPUs by a stand-in for NVML."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import ROOT, free_port

from recipes.preflight import diskfacts, gpus, netfacts, nodefacts

# ---- the module as it runs on a node


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """The last line that the module prints."""
    done = subprocess.run(
        [sys.executable, "-m", "recipes.preflight.nodefacts"],
        cwd=ROOT,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    data = {"kind": "files", "files": [f"{tmp_path}/*.txt", "https://x/y"]}
    request = {"round": "facts", "me": "localhost", "hosts": ["localhost", "no.such.invalid"]}
    request |= {"id": "t", "folder": str(tmp_path / "new" / "run"), "port": free_port()}
    request |= {"data": data, "files": [str(tmp_path / "a.txt")], "working_dir": str(tmp_path)}
    start = time.monotonic()
    found = ask(request)
    assert time.monotonic() - start < 10
    assert found["hostname"] == socket.gethostname()
    assert found["python"]["path"] == sys.executable
    assert found["packages"]["torch"].startswith("2.") and found["packages"]["nccl"]
    assert found["sources"] == nodefacts.sources()
    assert found["files"] == {str(tmp_path / "a.txt"): "ba7816bf8f01"}  # SHA-256 of abc
    assert found["memory"]["total"] > found["memory"]["available"] > 0
    assert found["limits"]["open_files"] == nodefacts.limits()["open_files"]
    assert found["network"]["names"]["localhost"]["addresses"]
    assert found["network"]["names"]["no.such.invalid"]["error"]
    assert found["network"]["routes"]["localhost"]["interface"] == "lo"
    assert "error" not in found["port"]
    files, remote = found["data"]
    assert (files["count"], files["bytes"]) == (1, 3) and remote["unread"]
    assert abs(found["time"] - time.time()) < 10
    folder = found["folder"]
    assert folder["bytes_per_s"] > 0 and folder["free_bytes"] > 0 and folder["filesystem"]
    assert list((tmp_path / "new" / "run").iterdir())
    ask({"round": "leave", "id": "t", "me": "localhost"} | _pick(folder, "path", "made"))
    assert not (tmp_path / "new").exists()


def _pick(folder: dict[str, Any], path: str, made: str) -> dict[str, Any]:
    return {"folder": folder[path], "made": folder[made]}


def test_parameters_are_counted_without_building_them(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}
    request = {"seq_len": 1024, "model": {"config": config, "attention": "flash_attention_2"}}
    assert nodefacts.parameters(request) == {"count": 1_557_611_200}
    from transformers import AutoConfig

    AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    known = nodefacts.parameters({"seq_len": 32, "model": {"pretrained": str(tmp_path)}})
    assert known["count"] > 64 * 32000
    wrong = nodefacts.parameters({"seq_len": 32, "model": {"config": {"model_type": "gtp2"}}})
    assert "gpt2" in wrong["error"]


def test_a_folder_without_git_has_no_commit_but_a_hash(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.py").write_text("1")
    before = nodefacts.sources(tmp_path)
    assert nodefacts.commit(tmp_path) == "" and len(before) == 12
    (tmp_path / "recipes" / "a.py").write_text("2")
    assert nodefacts.sources(tmp_path) != before
    assert nodefacts.file_hash(tmp_path / "none") == "No such file or directory"


# ---- disk


def test_tokens_tell_whether_a_folder_is_shared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for host, folder in (("a", one), ("b", one), ("c", other)):
        diskfacts.enter(folder, "id", host)
    assert diskfacts.look(one, "id", ["a", "b", "c"], limit_s=0) == ["a", "b"]
    assert diskfacts.look(other, "id", ["a", "b", "c"], limit_s=0) == ["c"]
    assert diskfacts.look(one, "another", ["a"], limit_s=0) == []
    diskfacts.leave(one, "id", "a", [str(one)])
    assert one.exists(), "b's token is still there"


def test_a_folder_that_is_a_file_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = diskfacts.enter(tmp_path / "file" / "run", "id", "a")
    assert "Not a directory" in facts["error"] and facts["made"] == []


def test_a_lock_is_held_as_long_as_its_builder_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "py311_cpu" / "op" / "lock"
    path.parent.mkdir(parents=True)
    # As torch's FileBaton does it.
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL)
    (held,) = diskfacts.extension_locks(tmp_path)
    os.close(descriptor)
    (left,) = diskfacts.extension_locks(tmp_path)
    assert (held["held"], left["held"]) == (True, False)
    assert left["path"] == str(path) and left["age_s"] < 60
    assert diskfacts.extension_locks(tmp_path / "none") == []


def test_extensions_lie_where_torch_puts_them() -> None:
    from torch.utils.cpp_extension import get_default_build_root

    assert str(diskfacts.extension_root(dict(os.environ))) == get_default_build_root()
    assert diskfacts.extension_root({"TORCH_EXTENSIONS_DIR": "/x"}) == Path("/x")


def test_patterns_name_files_as_the_recipe_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in ("a/1.txt", "a/b/2.txt"):
        (tmp_path / place).write_text("x")
    patterns = [f"{tmp_path}/a/*.txt", f"{tmp_path}/a/**", f"{tmp_path}/a/1.txt", f"{tmp_path}/z*"]
    found = diskfacts.data_facts({"kind": "files", "files": patterns}, {})
    assert [entry["count"] for entry in found] == [1, 2, 1, 0]


def test_data_that_a_node_may_not_look_at_costs_no_other_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part").write_text("x")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))  # as without x on the folder

    monkeypatch.setattr(Path, "is_file", refuse)
    (found,) = diskfacts.data_facts({"kind": "saved", "path": str(tmp_path)}, {})
    assert found["error"] == "Permission denied"
    (tmp_path / "lock").touch()
    assert diskfacts.extension_locks(tmp_path) == []


def test_a_file_system_is_that_of_the_folder_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert (
        diskfacts._space(tmp_path / "link")["filesystem"]
        == diskfacts._space(Path("/dev/shm"))["filesystem"]
    )


def test_the_hub_is_reached_or_not_and_a_proxy_stands_for_it(tmp_path: Path) -> None:
    port = free_port()
    environ = {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    (closed,) = diskfacts.data_facts({"kind": "hub"}, environ)
    assert closed["unreached"] == "Connection refused"
    with socket.create_server(("127.0.0.1", port)):
        (opened,) = diskfacts.data_facts({"kind": "hub"}, environ)
        proxied = {"https_proxy": f"http://127.0.0.1:{port}"}
        (way,) = diskfacts.data_facts({"kind": "hub"}, proxied)
    assert opened["reached"] and way["reached"]
    (secret,) = diskfacts.data_facts({"kind": "hub"}, {"https_proxy": f"u:pa55@127.0.0.1:{port}"})
    assert secret == {"what": f"http://127.0.0.1:{port}", "unreached": "Connection refused"}
    (wrong,) = diskfacts.data_facts({"kind": "hub"}, {"HF_ENDPOINT": "http://hub:8O8O"})
    assert "Port" in wrong["unreached"] and "HF_ENDPOINT" in wrong["what"]
    (off,) = diskfacts.data_facts({"kind": "hub"}, {"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE" in off["unread"]
    (sources,) = diskfacts.data_facts({"kind": "python_stdlib"}, {})
    assert sources["count"] > 500


# ---- network


@contextmanager
def _threads(*requests: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    answers: list[dict[str, Any]] = [{} for _ in requests]

    def one(index: int) -> None:
        answers[index].update(netfacts.meet(requests[index]))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield answers


def request(me: str, listen: list[int], peers: dict[str, list[int]], **more: Any) -> dict[str, Any]:
    """A `meet` request."""
    return {"id": "t", "me": me, "listen": listen, "peers": peers, "limit_s": 1.0} | more


def test_nodes_that_meet_tell_each_other_the_time() -> None:
    a, b = free_port(), free_port()
    start = time.monotonic()
    one, two = request("a", [a], {"127.0.0.1": [b]}), request("b", [b], {"127.0.0.1": [a]})
    with _threads(one | {"limit_s": 30.0}, two | {"limit_s": 30.0}) as answers:
        assert time.monotonic() - start < 10, "they wait for nobody"
    for answer, mine, other in zip(answers, (a, b), (b, a), strict=True):
        assert answer["listening"] == {str(mine): ""}
        assert answer["reached"] == {"127.0.0.1": {str(other): ""}}
        clock = answer["clocks"]["127.0.0.1"]
        assert abs(clock["ahead_s"]) <= clock["uncertainty_s"] + 0.01 < 1


def test_a_refusal_a_foreign_program_and_a_wrong_name_are_told_apart() -> None:
    closed, foreign = free_port(), free_port()

    def hang_up(server: socket.socket) -> None:
        server.accept()[0].close()

    with socket.create_server(("127.0.0.1", foreign)) as server:
        thread = threading.Thread(target=hang_up, args=(server,))
        thread.start()
        peers = {"127.0.0.1": [closed, foreign], "no.such.invalid": [closed]}
        found = netfacts.meet(request("a", [foreign], peers))
        thread.join()
    assert found["reached"]["127.0.0.1"][str(closed)] == "refused"
    assert found["reached"]["127.0.0.1"][str(foreign)] == "another program answers there"
    assert found["reached"]["no.such.invalid"][str(closed)] not in ("", "refused", "no answer")
    assert found["listening"] == {str(foreign): "Address already in use"}


def test_a_node_that_is_too_busy_to_talk_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netfacts, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, says nothing
        port = server.getsockname()[1]
        found = netfacts.meet(request("a", [], {"127.0.0.1": [port]}))
    assert found["reached"]["127.0.0.1"] == {str(port): ""} and found["clocks"] == {}


def test_who_has_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = netfacts.port_fact(port)
    assert found["error"] == "Address already in use"
    assert any(f"(pid {os.getpid()}, " in holder for holder in found["holders"])
    assert netfacts.port_fact(port) == {"port": port}


# ---- GPUs: the stand-in has pynvml's names and return types (nvidia-ml-py 13); no GPU ran this


class NVMLError(Exception):
    """As pynvml's, but for its text."""

    def __init__(self, text: str, value: int = 999) -> None:
        super().__init__(text)
        self.value = value


class Nvml:
    """Four GPUs: in a good state; in a bad one and without ECC; lost; another job's."""

    NVMLError = NVMLError

    def __init__(self, pid: int) -> None:
        self.open, self.pid = False, pid

    def nvmlInit(self) -> None:  # noqa: N802
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 4

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65.06"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise NVMLError("GPU is lost" if index == 2 else "Insufficient Permissions", index + 1)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 << 30, free=70 << 30, used=10 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x1 if handle == 0 else 0x4 | 0x40 | 0x80

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:  # noqa: N802
        return (0, 0, handle, 0)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0)  # uncorrected, volatile
        if handle == 1:
            raise NVMLError("Not Supported")
        return 0

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 40

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=self.pid, usedGpuMemory=1 << 30)] if handle else []


def test_what_nvml_says_becomes_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(os.getpid())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    found = gpus.read_gpus()
    good, poor, lost = found["devices"]
    assert found["driver"] == "580.65.06" and not nvml.open
    assert good["model"] == "NVIDIA H100 80GB HBM3" and good["used_bytes"] == 10 << 30
    assert (good["slowdowns"], good["processes"], good["uncorrected_errors"]) == ([], [], 0)
    assert poor["slowdowns"] == ["thermal slowdown by the hardware", "power brake"]
    assert f"(pid {os.getpid()}, " in poor["processes"][0]
    assert poor["uncorrected_errors"] is None and poor["remap_pending"] and not poor["mig"]
    assert lost == {"index": 2, "error": "GPU is lost"}


def test_no_gpu_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    empty = SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail)
    monkeypatch.setitem(sys.modules, "pynvml", empty)  # type: ignore[arg-type]
    assert gpus.read_gpus()["error"].startswith("NVML: Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert gpus.read_gpus() == {"unread": "nvidia-ml-py is not installed", "devices": []}


def test_the_stand_in_has_the_real_names() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [n for n in vars(Nvml) if n.startswith("nvml") and not hasattr(pynvml, n)] == []
    assert pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED == 1 and pynvml.NVML_VOLATILE_ECC == 0
    assert pynvml.NVML_TEMPERATURE_GPU == 0
    assert pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION).value == gpus.NO_PERMISSION
    bits = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    named = [getattr(pynvml, f"nvmlClocksThrottleReason{bit}") for bit in bits]
    assert list(gpus.SLOWDOWNS) == named and hasattr(pynvml, "nvmlDeviceGetMigMode")
