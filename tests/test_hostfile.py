"""The hostfile: strict, and every fault at once with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.cluster.hostfile import Host, read_hostfile, select

ROOT = Path(__file__).resolve().parent.parent


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_hostfile_names_two_machines_with_four_gpus() -> None:
    assert read_hostfile(ROOT / "hostfile") == (
        Host(name="worker-0", slots=4),
        Host(name="worker-1", slots=4),
    )


def test_comments_blank_lines_and_white_space_are_ignored_and_the_order_is_kept(
    tmp_path: Path,
) -> None:
    text = "# all\n\n  b.example.org   slots=12 # the big one\r\n\ta\tslots=1\n   # end\n"
    assert read_hostfile(write(tmp_path, text)) == (
        Host(name="b.example.org", slots=12),
        Host(name="a", slots=1),
    )


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a slots=",
        "a slots=0",
        "a slots=-4",
        "a slots=4x",
        "a slots=04",
        "a slots=4.0",
        "a slots=+4",
        "a slots = 4",
        "a slots=4 max_slots=8",
        "a slots=4 slots=4",
        "a SLOTS=4",
        "a 4",
        "a slots=4,",
    ],
)
def test_anything_but_a_whole_number_of_slots_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read_hostfile(write(tmp_path, f"b slots=2\n{line}\n"))
    expected = f"line 2 {line!r}: expected 'a slots=N' with N a whole number above zero"
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["me@a", "a:22", "me@a:22"])
def test_user_and_port_are_sent_to_the_ssh_configuration(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1 .*belong into ~/\.ssh/config"):
        read_hostfile(write(tmp_path, f"{name} slots=4\n"))


def test_all_faults_come_together_with_their_line_numbers(tmp_path: Path) -> None:
    text = "# one\na slots=4\nb slots=4x\n\nme@c slots=1\na slots=2\n"
    with pytest.raises(ValueError) as caught:
        read_hostfile(write(tmp_path, text))
    assert str(caught.value).split("\n") == [
        f"3 faults in hostfile {tmp_path / 'hosts'}:",
        "  line 3 'b slots=4x': expected 'b slots=N' with N a whole number above zero",
        "  line 5 'me@c slots=1': user and port belong into ~/.ssh/config; expected a bare host "
        "name",
        "  line 6 'a slots=2': a stands here twice; give it one line with all its slots",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# worker-0 slots=4\n"])
def test_a_hostfile_without_a_host_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no host in it; expected lines like 'worker-0 slots=4'"):
        read_hostfile(write(tmp_path, text))


def test_a_missing_hostfile_is_an_error_and_not_a_run_on_this_machine_alone(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="absent can't be read: No such file or directory"):
        read_hostfile(tmp_path / "absent")


def test_a_folder_is_no_hostfile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        read_hostfile(tmp_path)


def test_bytes_that_are_no_text_are_refused_by_file_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"worker-\xff slots=4\n")
    with pytest.raises(ValueError, match="hosts"):
        read_hostfile(path)


def test_a_byte_order_mark_which_deepspeed_takes_for_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1 begins with a byte-order mark; save the file"):
        read_hostfile(write(tmp_path, "\ufeffa slots=4\n"))


@pytest.mark.parametrize("name", ["a[0-3]", "a,b", "-a", "^a", "a b*", "ä", "$HOST", "a;b"])
def test_what_pdsh_or_a_shell_would_expand_is_no_host_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1 .*(is no host name|expected .*slots=N)"):
        read_hostfile(write(tmp_path, f"{name} slots=4\n"))


def test_host_names_know_no_case(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2 .*A stands here twice"):
        read_hostfile(write(tmp_path, "a slots=4\nA slots=4\n"))


def test_every_host_knows_its_line(tmp_path: Path) -> None:
    hosts = read_hostfile(write(tmp_path, "# all\n\na slots=4\nb slots=2\n"))
    assert [host.line for host in hosts] == [3, 4]


# ---- a selection of hosts and slots

HOSTS = (Host(name="a", slots=4), Host(name="b", slots=4), Host(name="c", slots=2))


def chosen(hosts: tuple[Host, ...]) -> dict[str, tuple[int, ...]]:
    assert all(host.slots == len(host.gpus or ()) for host in hosts)
    return {host.name: host.gpus or () for host in hosts}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("a", "", {"a": (0, 1, 2, 3)}),
        ("a@c", "", {"a": (0, 1, 2, 3), "c": (0, 1)}),
        ("c:1@a:2,0", "", {"a": (0, 2), "c": (1,)}),
        ("", "a", {"b": (0, 1, 2, 3), "c": (0, 1)}),
        ("", "a:0,3@c", {"a": (1, 2), "b": (0, 1, 2, 3)}),
        ("", "c:0,1", {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}),
    ],
)
def test_a_selection_is_read_as_deepspeed_reads_it(
    include: str, exclude: str, expected: dict[str, tuple[int, ...]]
) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    found = chosen(select(HOSTS, include, exclude))
    pool = {host.name: host.slots for host in HOSTS}
    theirs = parse_inclusion_exclusion(pool, include, exclude)
    assert found == expected == {name: tuple(slots) for name, slots in theirs.items()}
    assert list(found) == list(theirs)  # ranks follow this order


def test_no_selection_changes_nothing() -> None:
    assert select(HOSTS) == HOSTS


def test_a_selection_of_a_selection_keeps_the_numbers_of_the_slots() -> None:
    assert chosen(select(select(HOSTS, "a:1,3"), exclude="a:1")) == {"a": (3,)}
    with pytest.raises(ValueError, match="a has no slot 0; it has 1 to 3"):
        select(select(HOSTS, "a:1,3"), "a:0")


def test_all_faults_of_a_selection_come_together() -> None:
    hosts = (*HOSTS, Host(name="worker-0", slots=1))
    with pytest.raises(ValueError) as caught:
        select(hosts, "a@@worker-1@b:4,0,9@c:1,1@c:@a:0@worker-0:0-3@worker-0:7")
    assert str(caught.value).split("\n") == [
        "8 faults in the selection of hosts:",
        "  --include '': expected NAME or NAME:SLOT,SLOT between the @, e.g. worker-0@worker-1:0,2",
        "  --include 'worker-1': worker-1 does not stand in the hostfile; did you mean worker-0?",
        "  --include 'b:4,0,9': b has no slots 4, 9; it has 0 to 3",
        "  --include 'c:1,1': a slot is named twice; name it once",
        "  --include 'c:': c is named twice; name it once with all its slots",
        "  --include 'a:0': a is named twice; name it once with all its slots",
        "  --include 'worker-0:0-3': expected slot numbers with commas between them, e.g. 0,2 "
        "(ranges are unknown)",
        "  --include 'worker-0:7': worker-0 is named twice; name it once with all its slots",
    ]


def test_include_and_exclude_together_are_refused_and_both_are_read() -> None:
    with pytest.raises(ValueError) as caught:
        select(HOSTS, "x", "y")
    assert str(caught.value).split("\n") == [
        "3 faults in the selection of hosts:",
        "  --include and --exclude are both given; give one",
        "  --include 'x': x does not stand in the hostfile; hosts: a, b, c",
        "  --exclude 'y': y does not stand in the hostfile; hosts: a, b, c",
    ]


def test_a_selection_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it leaves no slot of a:4 \+ b:4 \+ c:2"):
        select(HOSTS, exclude="a@b@c")
