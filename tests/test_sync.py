"""Sync: a checkout and its environment reach a node that has none, and nothing else is lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launching
import pytest
import rehearsing

from recipes.cluster.sync_survey import Source, token_in

pytestmark = rehearsing.rootful()

DRIVER = """
import logging, sys
from pathlib import Path
from recipes.cluster.hostfile import read_hostfile
from recipes.cluster.sync import sync
logging.basicConfig(level=logging.INFO, format="%(message)s")
hosts, root = read_hostfile(sys.argv[1]), Path(sys.argv[2])
try:
    dry = "--dry-run" in sys.argv
    print(sync(hosts, dry_run=dry, root=root, python=root / ".venv/bin/python"), end="")
except ValueError as error:
    sys.exit(str(error))
"""
WORKER = "worker-1"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearsing.Cluster]:
    """Two hosts with a node-local disk each, `disk` in their folder."""
    folder = tmp_path_factory.mktemp("sync")
    (folder / "disk").mkdir()
    hosts = {"worker-0": 1, WORKER: 1}
    with rehearsing.rehearsal(hosts, folder, local=[str(folder / "disk")]) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: rehearsing.Cluster) -> rehearsing.Cluster:
    """The same hosts; their disks are empty again, but for a small checkout on the first."""
    root = checkout(shared)
    for host in shared.names:
        shared.ok("rm", "-rf", str(root), host=host)
    made = root.parent.parent / "made"
    if not made.exists():
        make_checkout(made)
    shared.ok("cp", "-a", str(made), str(root))
    # A virtual environment holds its own path, so it is made in place.
    shared.ok(sys.executable, "-m", "venv", "--without-pip", str(root / ".venv"))
    return shared


def checkout(cluster: rehearsing.Cluster) -> Path:
    return cluster.folder / "disk" / "check out"  # with a space: paths pass through two shells


def make_checkout(folder: Path) -> None:
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "a module.py").write_text("A = 1\n")
    (folder / "package" / "old.py").write_text("B = 2\n")
    (folder / ".gitignore").write_text(".venv/\noutputs/\n__pycache__/\n")
    (folder / "outputs").mkdir()
    (folder / "outputs" / "big").write_text("here\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        git(folder, *words)
    (folder / "package" / "new.py").write_text("not committed yet\n")


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


def sync(cluster: rehearsing.Cluster, *options: str) -> launching.Ended:
    words = [sys.executable, "-c", DRIVER, str(cluster.hostfile), str(checkout(cluster))]
    return cluster.run([*words, *options], limit_s=120)


def there(cluster: rehearsing.Cluster, script: str) -> str:
    """Output of a script in the checkout's folder of the second host."""
    return cluster.ok("sh", "-c", f"cd '{checkout(cluster)}' && {script}", host=WORKER)


def here(cluster: rehearsing.Cluster, script: str) -> str:
    return cluster.ok("sh", "-c", f"cd '{checkout(cluster)}' && {script}")


COMMIT = "git describe --always --dirty"


def test_a_node_gets_files_commit_and_environment(cluster: rehearsing.Cluster) -> None:
    done = sync(cluster)
    assert done.code == 0, done.text
    assert done.text.splitlines()[-1] == f"{WORKER}: checkout, 4 files; environment"
    listed = there(cluster, "find . -path ./.git -prune -o -path ./.venv -prune -o -type f -print")
    expected = ["./.gitignore", "./package/a module.py", "./package/new.py", "./package/old.py"]
    assert sorted(listed.split("\n")[:-1]) == expected
    here(cluster, "git add package/new.py")
    assert sync(cluster).code == 0
    assert there(cluster, COMMIT) == here(cluster, COMMIT) != ""
    assert there(cluster, ".venv/bin/python -c 'import sys; print(sys.prefix)'") == (
        f"{checkout(cluster)}/.venv\n"
    )


def test_a_second_sync_deletes_what_the_first_brought_and_nothing_else(
    cluster: rehearsing.Cluster,
) -> None:
    assert sync(cluster).code == 0
    there(cluster, "mkdir outputs && touch outputs/theirs notes.txt package/theirs.py")
    here(cluster, "rm package/old.py package/new.py && git commit -qam second --author 'a <a@b>'")
    done = sync(cluster)
    assert "checkout, 2 files, 2 gone; environment" in done.text
    assert there(cluster, "ls package outputs notes.txt").split() == (
        ["notes.txt", "outputs:", "theirs", "package:", "a", "module.py", "theirs.py"]
    )
    assert there(cluster, "git rev-parse HEAD") == here(cluster, "git rev-parse HEAD")
    assert here(cluster, "git status --porcelain") == ""  # the probe is gone


def test_a_dry_run_prints_commands_that_work_and_does_nothing(cluster: rehearsing.Cluster) -> None:
    told = sync(cluster, "--dry-run")
    assert told.code == 0 and told.text.startswith(f"# {WORKER}: checkout, environment\n")
    assert cluster.ok("ls", str(checkout(cluster).parent), host=WORKER) == ""
    cluster.ok("sh", "-ec", told.text)
    assert there(cluster, "cat package/new.py") == "not committed yet\n"
    assert there(cluster, ".venv/bin/python -c 'print(1)'") == "1\n"


def test_a_shared_checkout_is_left_alone(shared: rehearsing.Cluster) -> None:
    """This project's own: every host sees it."""
    for options in ([], ["--dry-run"]):
        words = [sys.executable, "-c", DRIVER, str(shared.hostfile), str(rehearsing.ROOT)]
        done = shared.run([*words, *options], limit_s=60)
        assert done.code == 0, done.text
        assert f"{WORKER}: shared folder, nothing to do" in done.text


def test_commits_that_only_the_node_has_are_not_overwritten(cluster: rehearsing.Cluster) -> None:
    assert sync(cluster).code == 0
    there(cluster, "git -c user.name=b -c user.email=b@c commit -qm theirs --allow-empty")
    commit = there(cluster, "git rev-parse HEAD").strip()
    done = sync(cluster)
    assert done.code == 1 and f"commits that are not here ({commit[:12]}); fetch them" in done.text
    assert there(cluster, "git rev-parse HEAD").strip() == commit


def test_an_environment_made_on_the_node_is_compared_and_kept(cluster: rehearsing.Cluster) -> None:
    root = checkout(cluster)
    venv = [sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")]
    cluster.ok(*venv, host=WORKER)
    done = sync(cluster)
    assert done.code == 0 and "environment made there, same packages" in done.text
    there(
        cluster,
        'd=$(echo .venv/lib/python*/site-packages)/some_package-2.0.dist-info && mkdir "$d" && '
        'printf "Metadata-Version: 2.1\\nName: some_package\\nVersion: 2.0\\n" > "$d/METADATA"',
    )
    done = sync(cluster)
    assert done.code == 1
    assert "differs: some_package 2.0 (here absent); run make .venv/run.installed" in done.text


def test_what_a_node_lacks_is_named_for_all_nodes_together(
    shared: rehearsing.Cluster, cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    base = Path(sys.executable).resolve().parent
    rsync = shutil.which("rsync")
    assert rsync
    hosts = cluster.hostfile.read_text()
    cluster.hostfile.write_text(hosts + "worker-9 slots=1\n")
    cluster.ok("mount", "-t", "tmpfs", "tmpfs", str(base), host=WORKER)
    try:
        done = sync(cluster)
        assert done.code == 1
        assert f"{WORKER}: the environment's Python {base}" in done.text
        assert "is not there; install the same one" in done.text
        assert "worker-9: its name does not resolve" in done.text
    finally:
        cluster.hostfile.write_text(hosts)
        cluster.ok("umount", str(base), host=WORKER)
    cluster.ok("mount", "--bind", "/dev/null", rsync, host=WORKER)
    try:
        assert f"{WORKER}: no rsync there; install with: apt-get install" in sync(cluster).text
    finally:
        cluster.ok("umount", rsync, host=WORKER)


def test_a_checkout_that_can_not_be_written_is_told() -> None:
    source = Source(root=Path("/proc/self"), python=Path(sys.executable))  # for root, too
    with pytest.raises(ValueError, match="/proc/self can't be written"), token_in(source):
        pass
