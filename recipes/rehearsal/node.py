"""What runs inside a rehearsal: the switch and the hosts on it.

`namespaces.py` starts this file by its path, with the standard library only: a host need not see
this checkout. Everything it makes (links, mounts, keys, processes) lives in anonymous namespaces
whose first process is `switch`; when that one ends, the kernel removes all of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMESPACES = ("pid", "mnt", "net", "uts", "ipc")
# One layer of new namespaces, its own /proc, and no way to outlive the process that asked for it.
UNSHARE = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
UNSHARE += ["--mount-proc", "--"]
BRIDGE = "octet0"
# A tmpfs over this folder holds all that is written: ssh and sshd read their own files there.
SSH = Path("/etc/ssh")
SSH_CONFIG = """Host *
    IdentityFile /etc/ssh/rehearsal_key
    IdentitiesOnly yes
    IdentityAgent none
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
"""
SSHD_CONFIG = """HostKey /etc/ssh/rehearsal_host_key
AuthorizedKeysFile /etc/ssh/rehearsal_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
PrintMotd no
MaxStartups 1000
MaxSessions 1000
SetEnv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
Subsystem sftp internal-sftp
"""
# Written by a login or by sshd: each gets an empty file of its own over it.
LOGIN_RECORDS = ("/var/log/wtmp", "/var/log/btmp", "/var/log/lastlog", "/run/utmp")
LINK_WAIT_S = 15.0


class Fault(RuntimeError):
    """A step that this machine refused; the text is for the user."""


def _do(*words: str | Path, descriptors: tuple[int, ...] = ()) -> None:
    told = [str(word) for word in words]
    done = subprocess.run(told, capture_output=True, text=True, pass_fds=descriptors)
    if done.returncode != 0:
        raise Fault(f"`{shlex.join(told)}` failed: {(done.stderr or done.stdout).strip()}")


def _mount(*words: str | Path) -> None:
    _do("mount", "-n", *words)  # -n: no entry in an /etc/mtab outside


def _cover(path: str | Path, text: str) -> None:
    """Give the processes in here another content for an existing file."""
    path = Path(path)
    if path.exists():
        private = Path(tempfile.mkstemp(dir=SSH, prefix=path.name)[1])  # hosts share the folder
        private.write_text(text, encoding="utf-8")
        private.chmod(path.stat().st_mode & 0o777)
        _mount("--bind", private, path)


# ---- the switch


def _hide_the_users_ssh(plan: dict[str, Any]) -> None:
    """Own ssh files, keys and names in place of this machine's, for the processes in here."""
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", SSH)
    (SSH / "ssh_config").write_text(SSH_CONFIG, encoding="utf-8")
    (SSH / "sshd_config").write_text(SSHD_CONFIG, encoding="utf-8")
    for name in ("rehearsal_key", "rehearsal_host_key"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", SSH / name)
    for home in plan["homes"]:
        if Path(home, ".ssh").is_dir():
            _mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", Path(home, ".ssh"))
    names = ["127.0.0.1 localhost", "::1 localhost"]
    names += [f"{host['address']} {host['name']}" for host in plan["hosts"]]
    _cover("/etc/hosts", "\n".join(names) + "\n")
    with suppress(FileNotFoundError):  # names come from that file alone; nothing answers DNS here
        switch = Path("/etc/nsswitch.conf").read_text(encoding="utf-8")
        _cover("/etc/nsswitch.conf", re.sub(r"(?m)^hosts:.*$", "hosts: files", switch))
    if Path("/run/nscd").is_dir():  # a cache would answer with the outside's names
        _mount("-t", "tmpfs", "tmpfs", "/run/nscd")
    for path in LOGIN_RECORDS:
        _cover(path, "")
    with suppress(FileNotFoundError):  # without PAM, sshd lets nobody in whose password is locked
        shadow = Path("/etc/shadow").read_text(encoding="utf-8")
        if re.search(r"(?m)^root:!", shadow):
            _cover("/etc/shadow", re.sub(r"(?m)^root:![^:]*", "root:*", shadow))


def _check_sshd(sshd: str) -> None:
    """Whether this sshd takes our configuration; makes the empty folder that some insist on."""
    for _ in range(2):
        done = subprocess.run(
            [sshd, "-t", "-f", SSH / "sshd_config"], capture_output=True, text=True
        )
        missing = re.search(r"privilege separation directory: (\S+)", done.stderr)
        if not missing:
            break
        _make_privately(Path(missing[1]))
    if done.returncode != 0:
        raise Fault(f"{sshd} refuses its configuration: {done.stderr.strip()}")


def _make_privately(folder: Path) -> None:
    """Create a folder for the processes in here only: its parent is rebuilt from bind mounts."""
    stage, parent = SSH / "stage", folder.parent
    stage.mkdir()
    _mount("--rbind", parent, stage)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", parent)
    for entry in stage.iterdir():
        place = parent / entry.name
        if entry.is_symlink():
            place.symlink_to(entry.readlink())
            continue
        if entry.is_dir():
            place.mkdir()
        else:
            place.touch()
        _mount("--rbind", entry, place)
    folder.mkdir(mode=0o755)


def _limit(device: str, rate_bits: int) -> None:
    """Let `device` send at this rate (bits/s on the wire).

    The burst is one millisecond's worth, so that timers keep up, yet never less than the largest
    segment the kernel hands down (64 KiB), which would else be cut up at the processor's expense.
    """
    burst = max(rate_bits // 8 // 1000, 68 * 1024)
    words = ["rate", f"{rate_bits}bit", "burst", f"{burst}b", "latency", "50ms"]
    try:
        _do("tc", "qdisc", "replace", "dev", device, "root", "tbf", *words)
    except Fault as fault:
        raise Fault(
            f"{fault}; expected a kernel with the tbf queue (`modprobe sch_tbf`); "
            "or rehearse without --bandwidth"
        ) from fault


def _plug_in(number: int, net: int, rate_bits: int | None) -> None:
    """A cable from the switch's port `v<number>` to the host's eth0."""
    port = f"v{number}"
    peer = ["peer", "name", "eth0", "netns", f"/proc/self/fd/{net}"]
    _do("ip", "link", "add", port, "type", "veth", *peer, descriptors=(net,))
    _do("ip", "link", "set", port, "master", BRIDGE, "up")
    if rate_bits:  # what the host receives; it limits itself what it sends
        _limit(port, rate_bits)


def receive(channel: socket.socket, expected: str) -> list[int]:
    """The descriptors of the other end's next message; its error as a Fault."""
    message, descriptors, *_ = socket.recv_fds(channel, 1 << 20, len(NAMESPACES))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    answer = json.loads(message or b'{"error": "ended without a word"}')
    if "error" in answer:
        raise Fault(answer["error"])
    assert answer == {"state": expected}, answer
    return list(descriptors)


def send(channel: socket.socket, message: object, descriptors: list[int] | None = None) -> None:
    """One message, with open descriptors."""
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors or [])


def _switch(channel: socket.socket) -> None:
    plan = json.loads(channel.recv(1 << 20))
    _hide_the_users_ssh(plan)
    _check_sshd(plan["sshd"])
    _do("ip", "link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
    _do("ip", "link", "set", BRIDGE, "up")
    lines = []
    for host in plan["hosts"]:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [*UNSHARE, sys.executable, "-I", "-S", __file__, "host", str(its.fileno())]
        subprocess.Popen(words, pass_fds=[its.fileno()])
        its.close()
        send(mine, plan | host)
        lines.append(mine)
    inside = [receive(line, "here") for line in lines]
    for number, (line, descriptors) in enumerate(zip(lines, inside, strict=True)):
        _plug_in(number, descriptors[NAMESPACES.index("net")], plan["rate_bits"])
        send(line, "plugged in")
    for line in lines:
        receive(line, "up")
    for descriptors in inside:
        send(channel, {"state": "host"}, descriptors)
    send(channel, {"state": "ready"})
    _become_init()
    channel.recv(1)  # returns when the other end is closed, by whatever death


# ---- a host


def _host(channel: socket.socket) -> None:
    plan = json.loads(channel.recv(1 << 20))
    own = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in NAMESPACES]
    send(channel, {"state": "here"}, own)
    for descriptor in own:
        os.close(descriptor)
    socket.sethostname(plan["host_name"])
    _cover("/etc/hostname", plan["host_name"] + "\n")
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    _show_own_interfaces()
    for folder in plan["local"]:
        _mount(
            "-t", "tmpfs", "-o", f"mode={Path(folder).stat().st_mode & 0o7777:o}", "tmpfs", folder
        )
    channel.recv(1 << 10)  # plugged in
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "address", "add", f"{plan['address']}/24", "dev", "eth0")
    _do("ip", "link", "set", "eth0", "up")
    for other in plan["hosts"]:  # the hostfile's own addresses need not share a subnet
        if other["address"] != plan["address"]:
            _do("ip", "route", "replace", f"{other['address']}/32", "dev", "eth0")
    if plan["rate_bits"]:
        _limit("eth0", plan["rate_bits"])
    _serve_ssh(plan)
    send(channel, {"state": "up"})
    _become_init()
    while True:
        signal.pause()


def _show_own_interfaces() -> None:
    """/sys/class/net of this host, with the rest of /sys (cgroups, devices) left as it is."""
    own = Path("/dev/shm/sys")  # under a tmpfs of this host's; moved out of sight below
    own.mkdir()
    _mount("-t", "sysfs", "sysfs", own)
    for part in ("devices/virtual/net", "class/net"):
        _mount("--bind", own / part, Path("/sys", part))
    _do("umount", "-n", "-l", own)
    own.rmdir()


def _serve_ssh(plan: dict[str, Any]) -> None:
    """Start sshd and wait until it answers on the host's address."""
    log = SSH / f"log.{plan['host_name']}"
    log.touch()
    words = [plan["sshd"], "-D", "-f", str(SSH / "sshd_config"), "-E", str(log)]
    words += ["-o", f"ListenAddress={plan['address']}"]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    end = time.monotonic() + LINK_WAIT_S
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError), socket.create_connection((plan["address"], 22), 1.0) as probe:
            if probe.recv(8).startswith(b"SSH-"):
                return
        time.sleep(0.02)
    state = "does not answer" if server.poll() is None else f"ended with {server.returncode}"
    raise Fault(f"sshd of {plan['name']} {state}: {log.read_text(encoding='utf-8').strip()}")


def _become_init() -> None:
    """The first process of a pid namespace: adopts orphans, reaps them, and is not interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)  # ignoring SIGCHLD makes the kernel reap
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)


def main(words: list[str]) -> None:
    """`switch CHANNEL` or `host CHANNEL`: a socket's descriptor, inherited."""
    channel = socket.socket(fileno=int(words[1]))
    channel.set_inheritable(False)
    try:
        {"switch": _switch, "host": _host}[words[0]](channel)
    except (Fault, OSError) as error:
        with suppress(OSError):
            send(channel, {"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
