"""The rehearsal: hosts that are real to every program, and of which nothing is left."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import launching
import psutil
import pytest
import rehearsing

pytestmark = rehearsing.rootful()

# Notes every signal in a file, and ends with 75 a second after the first, as a run that saves does.
NOTES_SIGNALS = """
import signal, sys, time
def note(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(signal.Signals(number).name + "\\n")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
open(sys.argv[1], "a").close()
while not open(sys.argv[1]).read():
    time.sleep(0.01)
time.sleep(1)
sys.exit(75)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearsing.Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "disk").mkdir()
    (folder / "disk" / "outside").touch()
    hosts = {"worker-0": 2, "worker-1": 2}
    with rehearsing.rehearsal(hosts, folder, local=[str(folder / "disk")]) as cluster:
        yield cluster


def octet_rehearse(folder: Path, *command: str, bandwidth: str = "") -> list[str]:
    """The command line of a rehearsal of two hosts."""
    hostfile = folder / "hosts"
    hostfile.write_text("worker-0 slots=2\nworker-1 slots=2\n", encoding="utf-8")
    options = ["--hostfile", str(hostfile)] + (["--bandwidth", bandwidth] if bandwidth else [])
    return [str(launching.BIN / "octet"), "rehearse", *options, "--", *command]


def outside() -> dict[str, Any]:
    """What a rehearsal must leave as it is: links, namespaces, mounts, names, ssh's files."""
    shown = {
        words: subprocess.run(words.split(), capture_output=True, text=True, check=True).stdout
        for words in ("ip -o link", "ip netns list", "ip -o address")
    }
    shown = {words: re.sub(r"_lft \S+", "", text) for words, text in shown.items()}
    folders = [Path("/etc/ssh"), Path("/run/sshd"), Path.home() / ".ssh"]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    files += [Path("/etc/hosts"), Path("/etc/hostname"), Path("/etc/nsswitch.conf")]
    files += [Path("/proc/self/mounts"), Path("/proc/sys/kernel/hostname")]
    shown |= {str(path): path.read_bytes() for path in files if path.exists()}
    return shown | {str(folder): folder.exists() for folder in folders}


def namespace_ids(processes: Sequence[psutil.Process]) -> set[int]:
    found = set()
    for path in (f"{p.pid}/ns/{kind}" for p in processes for kind in ("pid", "net", "mnt")):
        with suppress(OSError):  # it has ended meanwhile
            found.add(Path("/proc", path).stat().st_ino)
    own = {Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net", "mnt")}
    return found - own


def still_used(namespaces_: set[int]) -> list[str]:
    """Processes in any of these namespaces."""
    return [str(p) for p in psutil.process_iter() if namespace_ids([p]) & namespaces_]


# ---- the hosts


def test_hosts_reach_each_other_by_name_in_both_directions(cluster: rehearsing.Cluster) -> None:
    for host, other in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
        assert cluster.ok("ssh", other, "hostname", host=host) == f"{other}\n"
        assert cluster.ok("hostname", "-I", host=host).split()[0] == cluster.addresses[host]
        assert cluster.ok("cat", "/etc/hostname", host=host) == f"{host}\n"
    names = cluster.ok("pdsh", "-R", "ssh", "-w", "worker-[0-1]", "hostname").splitlines()
    assert sorted(names) == ["worker-0: worker-0", "worker-1: worker-1"]
    copied = cluster.ok("scp", str(cluster.hostfile), "worker-1:/dev/shm/copy")
    assert copied == "" and cluster.ok("cat", "/dev/shm/copy", host="worker-1")


def test_a_host_has_its_own_processes_memory_links_and_private_folders(
    cluster: rehearsing.Cluster,
) -> None:
    disk = str(cluster.folder / "disk")
    with cluster.start(["sleep", "60"], host="worker-1"):
        seen = cluster.ok("ps", "-eo", "args", host="worker-1")
        assert "sleep 60" in seen and str(Path(sys.argv[0]).name) not in seen
        assert "sleep 60" not in cluster.ok("ps", "-eo", "args")
        assert [p.name() for p in cluster.processes("worker-1")] == ["sleep"]
    cluster.ok("touch", "/dev/shm/mine", f"{disk}/mine")
    assert cluster.ok("ls", disk) == "mine\n" and cluster.ok("ls", disk, host="worker-1") == ""
    assert "mine" not in cluster.ok("ls", "/dev/shm", host="worker-1")
    assert not Path("/dev/shm/mine").exists() and (Path(disk) / "outside").exists()
    assert cluster.ok("ls", "/sys/class/net").split() == ["eth0", "lo"]
    before = cluster.sent_bytes("worker-1")
    cluster.ok("ssh", "worker-1", "head -c 1000000 /dev/zero")
    assert 1_000_000 < cluster.sent_bytes("worker-1") - before < 1_200_000


def test_a_command_for_ssh_finds_the_system_s_tools(cluster: rehearsing.Cluster) -> None:
    assert "/sbin/ip" in cluster.ok("ssh", "worker-1", "command -v ip")


def test_a_name_that_is_not_in_the_hostfile_is_unknown(cluster: rehearsing.Cluster) -> None:
    ended = cluster.run(["ssh", "worker-7", "true"], limit_s=20)
    assert ended.code == 255 and "worker-7" in ended.text


def test_a_command_or_folder_that_is_not_there_is_an_error(cluster: rehearsing.Cluster) -> None:
    with pytest.raises(ValueError, match="no-such-command on worker-0: .*No such file"):
        cluster.run(["no-such-command"])
    with pytest.raises(ValueError, match="/no/such/folder: No such file"):
        cluster.run(["true"], cwd=Path("/no/such/folder"))


def test_two_rehearsals_do_not_know_of_each_other_and_a_host_can_die(
    cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    with rehearsing.rehearsal({"worker-0": 1, "worker-1": 1}, tmp_path) as second:
        assert second.addresses == cluster.addresses
        second.ok("ssh", "worker-1", "touch /dev/shm/second")
        assert "second" not in cluster.ok("ssh", "worker-1", "ls /dev/shm")
        second.ok("pkill", "sshd", host="worker-1")
        refused = second.run(["ssh", "worker-1", "true"], limit_s=20)
        assert "Connection refused" in refused.text
        second.power_off("worker-1")
        assert not second.processes("worker-1", system=True)
        silent = second.run(["ssh", "-o", "ConnectTimeout=1", "worker-1", "true"], limit_s=20)
        assert silent.code == 255 and "timed out" in silent.text
    assert cluster.ok("ssh", "worker-1", "hostname") == "worker-1\n"


def test_addresses_in_the_hostfile_are_the_hosts_own(tmp_path: Path) -> None:
    hosts = {"192.168.7.5": 1, "10.1.0.9": 1}
    with rehearsing.rehearsal(hosts, tmp_path) as cluster:
        for host, other in (("192.168.7.5", "10.1.0.9"), ("10.1.0.9", "192.168.7.5")):
            answer = cluster.ok("ssh", other, "hostname -I", host=host)
            assert answer.split()[0] == other


# ---- the link


SERVE = """
import socketserver
class Sink(socketserver.BaseRequestHandler):
    def handle(self):
        while self.request.recv(1 << 20):
            pass
socketserver.ThreadingTCPServer(("", 5001), Sink).serve_forever()
"""
SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 5001))
start, left, piece = time.perf_counter(), int(sys.argv[2]), bytes(1 << 18)
while left > 0:
    left -= link.send(piece[:left])
link.shutdown(socket.SHUT_WR)
link.recv(1)  # the other end closes when it has everything
print(int(sys.argv[2]) * 8 / (time.perf_counter() - start))
"""


@pytest.mark.parametrize("mbit", [200, 1000])
def test_a_link_carries_its_rate(mbit: int, tmp_path: Path) -> None:
    hosts = {"a": 1, "b": 1, "c": 1}
    size = str(mbit * 1_000_000 // 8 // 2)  # half a second
    with rehearsing.rehearsal(hosts, tmp_path, bandwidth=f"{mbit}mbit") as cluster:
        cluster.start([sys.executable, "-c", SERVE], host="c")
        listening = "ss -ltn | grep :5001"
        launching.wait_for(
            lambda: cluster.run(["sh", "-c", listening], host="c").code == 0, 20, "the server"
        )
        rates = [float(cluster.ok(sys.executable, "-c", SEND, "c", size)) for _ in range(3)]
        best = min(rates, key=lambda rate: abs(rate / (mbit * 1e6) - 1))
        assert 0.9 < best / (mbit * 1e6) < 1.1, rates
        # What c receives is limited too, whoever sends: two at once share its link.
        with cluster.start([sys.executable, "-c", SEND, "c", size], host="b") as other:
            rate = float(cluster.ok(sys.executable, "-c", SEND, "c", size))
            assert rate + float(other.wait(60).text) < 1.3 * mbit * 1e6


# ---- the command, from its start to its end


def test_the_command_has_the_caller_s_folder_environment_and_streams(tmp_path: Path) -> None:
    script = 'cat; pwd; echo "$MARK"; hostname; ssh worker-1 hostname; echo told >&2; exit 7'
    before = outside()
    done = subprocess.run(
        octet_rehearse(tmp_path, "sh", "-c", script, bandwidth="1gbit"),
        cwd=tmp_path,
        env=rehearsing.shell_env({"MARK": "a 'b' $c"}),
        input="from stdin\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    expected = ["from stdin", str(tmp_path), "a 'b' $c", "worker-0", "worker-1"]
    assert done.stdout.splitlines() == expected
    assert "told\n" in done.stderr
    assert "worker-0 10.77.0.10  worker-1 10.77.0.11  (links of 1gbit each way)" in done.stderr
    assert outside() == before


def test_a_death_by_signal_is_128_and_more(tmp_path: Path) -> None:
    words = octet_rehearse(tmp_path, "sh", "-c", "kill -9 $$")
    done = subprocess.run(words, cwd=tmp_path, env=rehearsing.shell_env(), timeout=60)
    assert done.returncode == 137


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "group", "terminal"])
def test_a_signal_reaches_the_command_once_and_it_ends_in_its_own_time(
    way: str, tmp_path: Path
) -> None:
    """Sent to `octet rehearse` alone, to its whole group, or typed as Ctrl-C at a terminal."""
    notes, before = tmp_path / "notes", outside()
    words = octet_rehearse(tmp_path, sys.executable, "-c", NOTES_SIGNALS, str(notes))
    env, master = rehearsing.shell_env(), -1
    pid = os.posix_spawn(words[0], words, env, setpgroup=0) if way != "terminal" else 0
    if way == "terminal":
        pid, master = pty.fork()
        if pid == 0:
            os.execve(words[0], words, env)
    launching.wait_for(notes.exists, 60, "the command's start")
    assert outside() == before  # while it is up
    inside = psutil.Process(pid).children(recursive=True)
    used = namespace_ids(inside)
    assert len(inside) > 5 and used
    if way == "terminal":
        os.write(master, b"\x03")
    elif way == "group":
        os.killpg(pid, signal.SIGINT)
    else:
        os.kill(pid, signal.Signals[way])
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert notes.read_text() == ("SIGTERM\n" if way == "SIGTERM" else "SIGINT\n")
    assert not still_used(used)
    assert outside() == before
    if way == "terminal":
        os.close(master)


def test_a_command_that_reads_from_the_terminal_gets_it(tmp_path: Path) -> None:
    words = octet_rehearse(tmp_path, "sh", "-c", 'read line; echo "got $line"; exit 5')
    pid, master = pty.fork()
    if pid == 0:
        os.execve(words[0], words, rehearsing.shell_env())
    os.write(master, b"a word\n")
    text = b""
    while b"got a word" not in text:
        text += os.read(master, 1000)
    _, status = os.waitpid(pid, 0)
    os.close(master)
    assert os.waitstatus_to_exitcode(status) == 5


@pytest.mark.parametrize("delay_s", [None, 0.3, 0.6])
def test_nothing_is_left_after_a_kill_9(delay_s: float | None, tmp_path: Path) -> None:
    """Killed with a command running on both hosts (None), or while the hosts are being made."""
    script = "ssh -f worker-1 sleep 300; touch ready; sleep 300"
    words, before = octet_rehearse(tmp_path, "sh", "-c", script), outside()
    # A login is killed too: what the user's shell does at its start (pyenv locks a folder) must not
    # be left half done.
    hide = '[ ! -f ~/.bashrc ] || mount --bind /dev/null ~/.bashrc; exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", hide, "sh", *words]
    started = subprocess.Popen(words, cwd=tmp_path, env=rehearsing.shell_env())
    if delay_s is None:
        launching.wait_for((tmp_path / "ready").exists, 60, "the command's start")
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(delay_s)
    family = psutil.Process(started.pid).children(recursive=True)
    used = namespace_ids([p for p in family if p.is_running()])
    started.kill()
    started.wait()
    launching.wait_for(lambda: not still_used(used), 20, "the end of every process")
    launching.wait_for(lambda: not any(p.is_running() for p in family), 20, "the end of the family")
    assert outside() == before


def test_the_user_s_ssh_configuration_and_a_locked_root_do_not_interfere(tmp_path: Path) -> None:
    """In a private copy of the home folder and /etc/shadow, made as bind mounts."""
    stage, shadow, home = tmp_path / "stage", tmp_path / "shadow", Path.home()
    stage.mkdir()
    locked = re.sub(r"(?m)^root:[^:]*", "root:!", Path("/etc/shadow").read_text())
    shadow.write_text(locked, encoding="utf-8")
    inner = octet_rehearse(tmp_path, "ssh", "worker-1", "hostname")
    script = f"""set -e
        mount --rbind {home} {stage}
        mount -t tmpfs -o mode=700 tmpfs {home}
        for entry in $(ls -A {stage}); do
            [ "$entry" = .ssh ] && continue
            if [ -d {stage}/$entry ]; then mkdir {home}/$entry; else touch {home}/$entry; fi
            mount --rbind {stage}/$entry {home}/$entry
        done
        mkdir -m 700 {home}/.ssh
        printf 'Host *\\n  ProxyCommand false\\n' > {home}/.ssh/config
        mount --bind {shadow} /etc/shadow
        cat {home}/.ssh/config
        exec {shlex.join(inner)}"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=rehearsing.shell_env(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["  ProxyCommand false", "worker-1"]


def test_a_kernel_or_container_that_refuses_is_told_with_a_way_out(tmp_path: Path) -> None:
    for capability in ("sys_admin", "net_admin"):
        drop = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
        words = [*drop, *octet_rehearse(tmp_path, "true")]
        done = subprocess.run(words, env=rehearsing.shell_env(), capture_output=True, text=True)
        assert done.returncode == 2
        assert re.search(r"refuses a rehearsal: .*not permitted; .*--privileged", done.stderr)
