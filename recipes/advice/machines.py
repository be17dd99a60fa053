"""The machines that the options name: nodes and GPUs on each, the GPU, the network between."""

from __future__ import annotations

from recipes.advice.wanted import HOSTFILE, MOST_GPUS, Wanted
from recipes.cluster.hostfile import read_hostfile
from recipes.planner.hardware import Gpu, Hardware, Nic
from recipes.planner.workload import Measured


def machines_of(wanted: Wanted) -> tuple[int, int]:
    """Nodes and GPUs on each.

    Raises:
        ValueError: a hostfile that can't be read or has unequal nodes; options that contradict.
    """
    if wanted.nodes is not None or wanted.gpus is not None:
        faults = []
        if wanted.hostfile is not None:
            faults.append(
                f"--hostfile {wanted.hostfile} has no effect with --nodes and --gpus; leave one out"
            )
        if wanted.gpus is None:
            faults.append(f"--nodes {wanted.nodes} needs --gpus N, the GPUs of each")
        if faults:
            raise ValueError("\n".join(faults))
        assert wanted.gpus is not None
        return max(wanted.nodes or 1, 1), max(wanted.gpus, 1)
    path = wanted.hostfile or HOSTFILE
    hosts = read_hostfile(path)
    counts = sorted({host.slots for host in hosts})
    if len(counts) > 1:
        raise ValueError(
            f"hostfile {path} has nodes of {', '.join(map(str, counts[:-1]))} and {counts[-1]} "
            "GPUs; the plan knows equal nodes: leave some out, or ask with --nodes N --gpus N"
        )
    if len(hosts) * counts[0] > MOST_GPUS:
        raise ValueError(
            f"hostfile {path} has {len(hosts) * counts[0]:,} GPUs; the plan knows up to "
            f"{MOST_GPUS:,}: lower slots"
        )
    return len(hosts), counts[0]


def gpu_of(wanted: Wanted, hardware: Hardware) -> Gpu:
    """The GPU (ValueError: none is named, or none is known by the name)."""
    if wanted.gpu is None:
        raise ValueError(
            f"name the GPU: --gpu NAME, one of {', '.join(hardware.gpus)}; describe another "
            "in a file for --hardware (docs/planning.md)"
        )
    return hardware.gpu(wanted.gpu)


def nic_of(
    wanted: Wanted, hardware: Hardware, nodes: int | None, measured: Measured | None
) -> Nic | None:
    """The nodes' network; a measured one needs no name.

    Args:
        nodes: None where the machines are not known.
        measured: None where nothing was measured, or where its file is at fault.

    Raises:
        ValueError: no network between several nodes, an unknown one, or one that is measured too.
    """
    rate = measured.between_bytes_per_s if measured is not None else None
    if wanted.nic is not None:
        named = hardware.nic(wanted.nic)
        if rate is not None:
            raise ValueError(
                f"--nic {wanted.nic} has no effect: {wanted.measured} measured the network between "
                "the nodes; leave one out"
            )
        return named
    if measured is not None and rate is not None:
        source = f"{measured.path}: measured between nodes"
        return Nic(name="measured", source=source, bits_per_s=8 * rate, share=1.0)
    told = wanted.measured is not None and measured is None
    if nodes is not None and nodes > 1 and not told:
        raise ValueError(
            f"name the network between the {nodes} nodes: --nic 200gbit (all of a node's cards "
            f"together) or one of {', '.join(hardware.nics)}; or --measured preflight.json"
        )
    return None
