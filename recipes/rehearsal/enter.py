"""The way into a host of a rehearsal: this process becomes a command there.

`namespaces.py` starts this file by its path, with the standard library only, in the host's pid
namespace: `enter.py STATUS FOLDER NAMESPACES COMMAND...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def setns(descriptor: int) -> None:
    """Move this process (for a pid namespace: its later children) into a namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:  # os.setns needs Python 3.12
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def enter(status: int, folder: str, namespaces: list[int], words: list[str]) -> None:
    """Become a command on a host: same environment, streams and folder as the caller's.

    The caller has put this process into the host's pid namespace already. `status` closes when the
    command takes over, or says why it did not.
    """
    os.set_inheritable(status, False)
    try:
        for descriptor in namespaces:
            setns(descriptor)
            os.close(descriptor)
        os.chdir(folder)
        # A group of its own: a Ctrl-C or kill that the caller's group gets reaches it once.
        os.setpgid(0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; a command does not
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(status, f"{error.filename or words[0]}: {error.strerror}".encode())
        sys.exit(127)


if __name__ == "__main__":
    enter(int(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3].split(",")], sys.argv[4:])
