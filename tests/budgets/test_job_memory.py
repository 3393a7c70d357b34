"""RAM under the limits of control groups: a job's, a container's, and those around them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ebbtide.devices.job_memory import job_memory

MIB = 2**20
FIRST = {"limit": "memory.limit_in_bytes", "held": "memory.usage_in_bytes"}
SECOND = {"limit": "memory.max", "held": "memory.current"}


def group(folder: Path, names: dict[str, str], limit: str, held: int = 0, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["held"]).write_text(f"{held}\n")
    (folder / "memory.stat").write_text(stat)


def found(tmp_path: Path, memberships: str) -> tuple[int, int]:
    own = tmp_path / "own"
    own.write_text(memberships)
    ram = job_memory(tmp_path / "groups", own)
    return ram.total, ram.available


def test_the_least_limit_of_all_groups_around_counts(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "slurm/job/step", SECOND, "max", MIB)
    group(groups / "slurm/job", SECOND, str(64 * MIB), 16 * MIB)
    group(groups / "slurm", SECOND, str(96 * MIB), 90 * MIB)
    assert found(tmp_path, "0::/slurm/job/step\n") == (64 * MIB, 6 * MIB)


def test_files_that_the_kernel_gives_up_are_free(tmp_path: Path) -> None:
    stat = f"anon {MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\ntotal_inactive_file {9 * MIB}\n"
    group(tmp_path / "groups", SECOND, str(8 * MIB), 4 * MIB, stat)
    assert found(tmp_path, "0::/\n") == (8 * MIB, 7 * MIB)


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    stat = f"inactive_file {9 * MIB}\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n"
    group(tmp_path / "groups/memory/job", FIRST, str(8 * MIB), 4 * MIB, stat)
    group(tmp_path / "groups/memory", FIRST, "9223372036854771712", 4 * MIB)
    assert found(tmp_path, "5:cpu,cpuacct:/\n4:hugetlb,memory:/job\n0::/\n") == (8 * MIB, 6 * MIB)


def test_a_container_that_sees_the_machines_name_of_its_group(tmp_path: Path) -> None:
    group(tmp_path / "groups/memory", FIRST, str(8 * MIB), 3 * MIB)
    assert found(tmp_path, "4:memory:/docker/0123\n") == (8 * MIB, 5 * MIB)


@pytest.mark.parametrize("memberships", ["", "0::/\n", "none\n", "0::/gone\n4:memory:/gone\n"])
def test_no_limit_is_the_machine(tmp_path: Path, memberships: str) -> None:
    total, available = found(tmp_path, memberships)
    assert total == psutil.virtual_memory().total and 0 < available <= total


def test_what_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    group(tmp_path / "groups", SECOND, str(MIB), 2 * MIB)
    assert found(tmp_path, "0::/\n") == (MIB, 0)
