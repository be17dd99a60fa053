"""The measurement with planted faults and host names, for tests.

    HOSTS=a,b FAULTS=slow,unreadable,wrong torchrun --nproc_per_node 2 tests/drivers/measured.py ...

HOSTS gives each rank's host name. On the last rank `slow` makes every matrix product take 10 ms
more, `unreadable` hides the data set, and `wrong` changes one value of what was all-gathered.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from recipes import measure


def plant(faults: set[str]) -> None:
    """Change what the measurement calls; imported here, since it imports late too."""
    import torch
    import torch.distributed as dist

    from recipes.preflight import measuring

    true_mm, true_gather = torch.mm, dist.all_gather_into_tensor

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return true_mm(*args, **kwargs)

    def wrong(whole: Any, *args: Any, **kwargs: Any) -> Any:
        done = true_gather(whole, *args, **kwargs)
        whole[-1] += 1
        return done

    def unreadable(*args: Any) -> Any:
        raise OSError("/data/corpus is not mounted")

    if "slow" in faults:
        torch.mm = slow
    if "wrong" in faults:
        dist.all_gather_into_tensor = wrong
    if "unreadable" in faults:
        measuring.Corpus.open = unreadable  # type: ignore[method-assign]


def main() -> int:
    rank = int(os.environ["RANK"])
    hosts = os.environ.get("HOSTS", "").split(",")
    if hosts != [""]:
        socket.gethostname = lambda: hosts[rank]
    if rank == int(os.environ["WORLD_SIZE"]) - 1 and os.environ.get("FAULTS"):
        plant(set(os.environ["FAULTS"].split(",")))
    return measure.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
