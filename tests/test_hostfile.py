"""The hostfile: strict, and every fault at once with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.cluster.hostfile import Host, read_hostfile

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
