"""From the facts of all nodes to the rows of the table; pure, so that every fault can be tested.

    rows = node_rows(facts, wanted)

`facts` holds for each host of the hostfile what `nodefacts` said, or `{"error": why}` where it said
nothing. What concerns machine and software stands here; `gpu_checks`, `network_checks`,
`meeting_checks` and `storage_checks` have the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.outcome import TOPOLOGY, USAGE
from recipes.preflight.gpu_checks import gpu_rows
from recipes.preflight.meeting_checks import meeting_rows
from recipes.preflight.network_checks import network_rows
from recipes.preflight.rows import Row, majority, many, size
from recipes.preflight.storage_checks import storage_rows
from recipes.preflight.wanted import Facts, Wanted

GIB = 1 << 30
OPEN_FILES = 4096  # sockets of a full mesh, shards of a data set and libraries, with room to spare
# A rank's interpreter with torch, transformers and DeepSpeed is resident with 0.3 to 0.5 GiB.
RANK_BYTES = GIB // 2
BUILD_BYTES = 4  # per parameter and rank: each builds the fp32 model in host memory first


def node_rows(facts: Facts, wanted: Wanted) -> list[Row]:
    """Every row that the facts of the nodes give."""
    there = {host: found for host, found in facts.items() if not found.get("error")}
    rows = ssh_rows(facts, wanted)
    if not there:
        return rows
    rows += machine_rows(there)
    rows += software_rows(there, wanted)
    rows += gpu_rows(there, wanted)
    rows += memory_rows(there, wanted)
    rows += network_rows(there, wanted)
    rows += meeting_rows(there, wanted)
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
                remedy = f"octet sync --hostfile {wanted.hostfile}"
            elif "ssh-copy-id" in advice:
                remedy = f"ssh-copy-id {host}"
            rows.append(
                Row(
                    check="ssh",
                    node=host,
                    found=reason,
                    expected="an answer",
                    verdict="FAIL",
                    remedy=remedy,
                )
            )
        else:
            rows.append(Row(check="ssh", node=host, found="answers"))
    return rows


def machine_rows(there: Facts) -> list[Row]:
    """Two names of one machine would share its GPUs."""
    first: dict[str, str] = {}
    rows = []
    for host, found in there.items():
        other = first.setdefault(found["machine"], host)
        if other != host:
            rows.append(
                Row(
                    check="machines",
                    node=host,
                    found=f"the same machine as {other}",
                    expected="a machine for every line",
                    verdict="FAIL",
                    remedy=f"# give {other} all its slots in one line of the hostfile, drop {host}",
                )
            )
    return rows


def equal_rows(
    check: str, values: Mapping[str, str], remedy: str, *, code: int = TOPOLOGY
) -> list[Row]:
    """A row for each node that differs from most of them; one for every node where none does."""
    common = majority(values)
    odd = {node: value for node, value in values.items() if value != common}
    if not odd:
        return [Row(check=check, node=node, found=common) for node in values]
    others = "all others" if len(values) - len(odd) > 1 else next(n for n in values if n not in odd)
    return [
        Row(
            check=check,
            node=node,
            found=value,
            expected=f"{common}, as on {others}",
            verdict="FAIL",
            remedy=remedy,
            code=code,
        )
        for node, value in odd.items()
    ]


def software_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Interpreter, packages, our own code, run file and arm: the same everywhere."""
    sync = f"octet sync --hostfile {wanted.hostfile}"
    rows = equal_rows("python", {n: _python(f) for n, f in there.items()}, sync)
    names = next(iter(there.values()))["packages"].keys()
    by_name = {k: {n: f["packages"].get(k, "?") for n, f in there.items()} for k in names}
    for name, values in by_name.items():
        if len(set(values.values())) > 1:
            rows += equal_rows(name, values, sync)
    same = [name for name, values in by_name.items() if len(set(values.values())) == 1]
    if same:
        first = next(iter(there.values()))["packages"]
        main = ", ".join(f"{k} {first[k]}" for k in ("torch", "deepspeed") if k in same)
        found = f"{len(same)} equal{' (' + main + ')' if main else ''}, NCCL {first['nccl']}"
        rows += [Row(check="packages", node=node, found=found) for node in there]
    rows += equal_rows("our code", {n: f["sources"] for n, f in there.items()}, sync)
    commits = {n: f["commit"] for n, f in there.items() if f["commit"]}
    if len(commits) > 1:
        rows += equal_rows("commit", commits, sync)
    return rows + file_rows(there, sync) + command_rows(there, wanted)


def file_rows(there: Facts, sync: str) -> list[Row]:
    """Run file and arm."""
    paths = next(iter(there.values()))["files"]
    values = {path: {n: f["files"].get(path, "?") for n, f in there.items()} for path in paths}
    rows, same = [], []
    for path, hashes in values.items():
        name = path.rsplit("/", 1)[-1]
        if len(set(hashes.values())) > 1:
            rows += equal_rows(name, hashes, sync, code=USAGE)
        else:
            same.append(name)
    if same:
        rows += [Row(check="files", node=node, found=f"equal: {', '.join(same)}") for node in there]
    return rows


def _python(found: Mapping[str, Any]) -> str:
    return f"{found['python']['version']} at {found['python']['path']}"


def command_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """The launcher's own programs, and files that would change what it starts."""
    program = wanted.launcher.partition("-")[0]
    first = wanted.hosts[0].name
    rows = []
    for node, found in there.items():
        if not found["commands"].get(program):
            sync = f"octet sync --hostfile {wanted.hostfile}"
            rows.append(_absent(program, node, sync))
    if wanted.needs_pdsh and first in there:
        where = there[first]["commands"].get("pdsh")
        row = Row(check="pdsh", node=first, found=str(where))
        rows.append(row if where else _absent("pdsh", first, "sudo apt-get install pdsh"))
    for message in there.get(first, {}).get("deepspeed_env", []):
        rows.append(
            Row(
                check=".deepspeed_env",
                node=first,
                found=message,
                expected="none: the launcher would merge it",
                verdict="FAIL" if wanted.needs_pdsh else "warn",
                remedy="# move that file away",
                code=USAGE,
            )
        )
    return rows


def _absent(program: str, node: str, remedy: str) -> Row:
    where = f"ssh {node} {remedy}" if remedy.startswith("sudo") else remedy
    return Row(
        check=program,
        node=node,
        found="not installed",
        expected="the launcher needs it",
        verdict="FAIL",
        remedy=where,
    )


def memory_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Host memory, swap, /dev/shm and limits."""
    rows = []
    for node, found in there.items():
        slots = wanted.slots(node)
        need = slots * (RANK_BYTES + BUILD_BYTES * (wanted.parameters or 0))
        have = found["memory"]
        rows.append(
            Row(
                check="host memory",
                node=node,
                found=f"{size(have['available'])} available",
                expected=f"{size(need)} for {many(slots, 'rank')}",
                verdict="ok" if have["available"] >= need else "warn",
                remedy=""
                if have["available"] >= need
                else f"ssh {node} ps aux --sort=-rss   # who has it",
            )
        )
        if have["swap_used"] > GIB:
            rows.append(
                Row(
                    check="swap",
                    node=node,
                    found=f"{size(have['swap_used'])} in use",
                    expected="next to none: ranks whose pages lie there are slow",
                    verdict="warn",
                    remedy=f"ssh {node} ps aux --sort=-rss",
                )
            )
        rows += [_shm_row(node, have, slots), *_limit_rows(node, found)]
    return rows


def _shm_row(node: str, have: Mapping[str, int], slots: int) -> Row:
    # NVIDIA asks for 1 GiB in its containers; NCCL takes up to some 10 MiB for each pair of ranks
    # and data workers pass tensors through it, hence 256 MiB a rank on large nodes. Docker gives
    # 64 MiB, with which ranks die of SIGBUS.
    need = max(GIB, slots * GIB // 4)
    if "shm_free" not in have:
        return Row(check="/dev/shm", node=node, found="none", expected=size(need), verdict="warn")
    enough = have["shm_free"] >= need
    return Row(
        check="/dev/shm",
        node=node,
        found=f"{size(have['shm_free'])} free",
        expected=size(need),
        verdict="ok" if enough else "warn",
        remedy=""
        if enough
        else f"ssh {node} sudo mount -o remount,size={need // (1 << 20)}m /dev/shm   "
        "# in a container: --shm-size",
    )


def _limit_rows(node: str, found: Mapping[str, Any]) -> list[Row]:
    rows = []
    files, locked = found["limits"]["open_files"], found["limits"]["locked_bytes"]
    if 0 <= files < OPEN_FILES:
        rows.append(
            Row(
                check="open files",
                node=node,
                found=f"limit {files}",
                expected=f"{OPEN_FILES}",
                verdict="warn",
                remedy=f'ssh {node} \'echo "* - nofile 65536" | '
                "sudo tee /etc/security/limits.d/octet.conf'",
            )
        )
    # Only InfiniBand pins its buffers against this limit.
    if locked >= 0 and found["network"]["infiniband"]:
        rows.append(
            Row(
                check="locked memory",
                node=node,
                found=f"limit {size(locked)}",
                expected="unlimited, for InfiniBand",
                verdict="warn",
                remedy=f'ssh {node} \'echo "* - memlock unlimited" | '
                "sudo tee /etc/security/limits.d/octet.conf'",
            )
        )
    return rows
