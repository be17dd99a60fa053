"""From the facts of all nodes to the rows of the table; pure, so that every fault can be tested.

    rows = node_rows(facts, wanted)

`facts` holds for each host of the hostfile what `nodefacts` said, or `{"error": why}` where it said
nothing. What concerns machine and software stands here; `gpu_checks`, `network_checks` and
`storage_checks` have the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.outcome import TOPOLOGY, USAGE
from recipes.preflight.gpu_checks import gpu_rows
from recipes.preflight.network_checks import network_rows
from recipes.preflight.rows import Facts, Row, Wanted, fail, many, odd_ones, ok, size, warn
from recipes.preflight.storage_checks import storage_rows

GIB = 1 << 30
MAIN = ("torch", "nccl", "deepspeed")  # packages whose versions are told
OPEN_FILES = 4096  # sockets of a full mesh, shards of a data set and libraries, with room to spare
LOCKED_BYTES = 4 * GIB  # InfiniBand pins its buffers against this limit; the default is some MiB
# A rank's interpreter with torch, transformers and DeepSpeed is resident with 0.3 to 0.5 GiB.
RANK_BYTES = GIB // 2
BUILD_BYTES = 4  # per parameter and rank: each builds the fp32 model in host memory first


def node_rows(facts: Facts, wanted: Wanted) -> list[Row]:
    """Every row that the facts of the nodes give."""
    rows = ssh_rows(facts, wanted)
    there = {host: found for host, found in facts.items() if not found.get("error")}
    if there:
        rows += machine_rows(there) + software_rows(there, wanted) + gpu_rows(there, wanted)
        rows += memory_rows(there, wanted) + network_rows(there, wanted)
        rows += storage_rows(there, wanted)
    return rows


def ssh_rows(facts: Facts, wanted: Wanted) -> list[Row]:
    """Whether each host answered, and the reason if not."""
    rows = []
    for host, found in facts.items():
        if error := found.get("error"):
            reason, _, advice = error.removeprefix(f"{host}: ").partition("; ")
            remedy = f"ssh {host} true   # {advice or 'says more'}"
            if "octet sync" in advice:
                remedy = wanted.sync
            elif "ssh-copy-id" in advice:
                remedy = f"ssh-copy-id {host}"
            rows.append(fail("ssh", host, reason, "an answer", remedy))
        else:
            rows.append(ok("ssh", host, "answers"))
    return rows


def machine_rows(there: Facts) -> list[Row]:
    """Two names of one machine would share its GPUs; two machines of one name count as one."""
    machines: dict[str, str] = {}
    names: dict[str, str] = {}
    rows = []
    for host, found in there.items():
        name = found["hostname"]
        same, namesake = machines.setdefault(found["machine"], host), names.setdefault(name, host)
        if same != host:
            remedy = f"# give {same} all its slots in one line of the hostfile, drop {host}"
            text = f"the same machine as {same}"
            rows.append(fail("machines", host, text, "a machine for every line", remedy))
        elif namesake != host:
            remedy = f"ssh -t {host} sudo hostnamectl set-hostname {host}"
            text = f"it calls itself {name}, as {namesake} does"
            rows.append(fail("machines", host, text, "a host name of its own", remedy))
    return rows


def equal_rows(
    check: str, values: Mapping[str, str], remedy: str, code: int = TOPOLOGY
) -> list[Row]:
    """A row for each node that differs from most of them; one for every node where none does."""
    odd, expected = odd_ones(values)
    if not odd:
        return [ok(check, node, value) for node, value in values.items()]
    return [fail(check, node, value, expected, remedy, code) for node, value in odd.items()]


def software_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Interpreter, packages, our own code, run file and arm: the same everywhere."""
    rows = equal_rows("python", {n: _python(f) for n, f in there.items()}, wanted.sync)
    differing, versions = _compare(there, "packages")
    for name, values in differing.items():
        rows += equal_rows(name, values, wanted.sync)
    if versions:
        main = ", ".join(f"{k} {versions[k]}" for k in MAIN if k in versions)
        found = f"{len(versions)} equal{f' ({main})' if main else ''}"
        rows += [ok("packages", node, found) for node in there]
    rows += equal_rows("our code", {n: f["sources"] for n, f in there.items()}, wanted.sync)
    commits = {n: f["commit"] for n, f in there.items() if f["commit"]}
    if len(commits) > 1:
        rows += equal_rows("commit", commits, wanted.sync)
    differing, files = _compare(there, "files")
    for path, values in differing.items():
        rows += equal_rows(_name(path), values, wanted.sync, USAGE)
    if files:
        rows += [ok("files", node, f"equal: {', '.join(map(_name, files))}") for node in there]
    return rows + command_rows(there, wanted)


def _compare(there: Facts, what: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Of named values: those that differ, by node, and those that are equal everywhere."""
    values = {
        name: {node: found[what].get(name, "?") for node, found in there.items()}
        for name in next(iter(there.values()))[what]
    }
    differing = {k: by_node for k, by_node in values.items() if len(set(by_node.values())) > 1}
    equal = {k: next(iter(v.values())) for k, v in values.items() if k not in differing}
    return differing, equal


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _python(found: Mapping[str, Any]) -> str:
    return f"{found['python']['version']} at {found['python']['path']}"


def command_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """The launcher's own programs, and files that would change what it starts."""
    program = wanted.launcher.partition("-")[0]
    absent = ("not installed", "the launcher needs it")
    rows = [
        fail(program, node, *absent, wanted.sync)
        for node, found in there.items()
        if not found["commands"].get(program)
    ]
    first = there.get(wanted.first)
    if first is None:
        return rows
    if wanted.by_pdsh and not first["commands"].get("pdsh"):
        remedy = f"ssh -t {wanted.first} sudo apt-get install pdsh"
        rows.append(fail("pdsh", wanted.first, *absent, remedy))
    for message in first.get("deepspeed_env", []):
        about = (".deepspeed_env", wanted.first, message, "none: the launcher would merge it")
        remedy = "# move that file away"
        rows.append(fail(*about, remedy, USAGE) if wanted.by_pdsh else warn(*about, remedy))
    return rows


def memory_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Host memory, /dev/shm and limits."""
    rows = []
    for node, found in there.items():
        slots, have = wanted.slots(node), found["memory"]
        need = slots * (RANK_BYTES + BUILD_BYTES * (wanted.parameters or 0))
        about = ("host memory", node, f"{size(have['available'])} available")
        expected = f"{size(need)} for {many(slots, 'rank')}"
        remedy = f"ssh {node} ps aux --sort=-rss | head   # who has it"
        enough = have["available"] >= need
        rows.append(ok(*about, expected) if enough else warn(*about, expected, remedy))
        rows += [_shm_row(node, have, slots), *_limit_rows(node, found)]
    return rows


def _shm_row(node: str, have: Mapping[str, int], slots: int) -> Row:
    # NVIDIA asks for 1 GiB in its containers; NCCL takes up to some 10 MiB for each pair of ranks
    # and data workers pass tensors through it, hence 256 MiB a rank on large nodes. Docker gives
    # 64 MiB, with which ranks die of SIGBUS.
    need, free = max(GIB, slots * GIB // 4), have.get("shm_free", 0)
    about = ("/dev/shm", node, f"{size(free)} free", size(need))
    if free >= need:
        return ok(*about)
    remedy = f"ssh -t {node} sudo mount -o remount,size={need >> 20}m /dev/shm"
    return warn(*about, remedy + "   # in a container: --shm-size")


def _limit_rows(node: str, found: Mapping[str, Any]) -> list[Row]:
    rows = []
    files, locked = found["limits"]["open_files"], found["limits"]["locked_bytes"]
    if 0 <= files < OPEN_FILES:
        remedy = _limit_remedy(node, "nofile 65536")
        rows.append(warn("open files", node, f"limit {files}", f"{OPEN_FILES}", remedy))
    if 0 <= locked < LOCKED_BYTES and found["network"]["infiniband"]:
        about = ("locked memory", node, f"limit {size(locked)}", "unlimited, for InfiniBand")
        rows.append(warn(*about, _limit_remedy(node, "memlock unlimited")))
    return rows


def _limit_remedy(node: str, limit: str) -> str:
    line = f'echo "* - {limit}" | sudo tee -a /etc/security/limits.d/octet.conf'
    return f"ssh -t {node} '{line}'   # holds from the next login on"
