from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import BudgetError, ConfigError, StateError, nearest
from ebbtide.units import format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512MB", 512 * 10**6),
        ("4 MiB", 4 * 2**20),
        (" 4 MiB ", 4 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("0.3GiB", 322122547),  # rounded down: a budget is never more than what was written
        ("2kB", 2000),
        ("2KB", 2000),
        ("7B", 7),
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes_people_write(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("24gb", "24GB"),
        ("24 Gb", "24GB"),
        ("24G", "24GB"),
        ("24gi", "24GiB"),
        ("512 mib", "512MiB"),
        ("1,5GB", "1.5GB"),
        ("1.5", "1.5GB"),
        ("2 gigabytes", "2GB"),
        ("24GB free", "24GB"),
    ],
)
def test_a_wrong_size_names_the_nearest_right_one(text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_size(text)
    assert f"found '{text}'; did you mean '{meant}'?" in str(error.value)
    parse_size(meant)


@pytest.mark.parametrize("wrong", ["", "much", "GB", "1e9", -1, 2.5, None, True, "9" * 5000, "٣GB"])
def test_no_size_at_all(wrong: object) -> None:
    with pytest.raises(ConfigError, match="expected a size such as '24GB'"):
        parse_size(wrong)  # type: ignore[arg-type]


def test_a_float_of_whole_bytes_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("found 24000000000.0; did you mean 24000000000?")):
        parse_size(24e9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (24 * 10**9, "22.4 GiB"),
        (4 * 2**20, "4.00 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (1023 * 1024, "1023 KiB"),
        (10239, "10.0 KiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_to_three_digits(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= 0.006 * size


@settings(deadline=None)
@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_round_up(n: int, multiple: int) -> None:
    rounded = round_up(n, multiple)
    assert rounded % multiple == 0
    assert n <= rounded < n + multiple


def test_errors_carry_what_a_program_needs() -> None:
    budget = BudgetError(
        "host: 3 GiB expected, 1 GiB found", tier="host", short=2 * 2**30, advice="add an SSD"
    )
    assert (budget.tier, budget.short, budget.advice) == ("host", 2 * 2**30, "add an SSD")
    assert str(budget) == "The budget is out of memory. host: 3 GiB expected, 1 GiB found; add an SSD"
    state = StateError("'w': COMPUTE to FREE", ["FREE to HOLD", "HOLD to COMPUTE"])
    assert state.history == ("FREE to HOLD", "HOLD to COMPUTE")
    assert str(state).endswith("oldest first:\n  FREE to HOLD\n  HOLD to COMPUTE")
    assert str(StateError("no history")) == "no history"


def test_nearest() -> None:
    assert nearest("precison", ["precision", "placement"]) == "; did you mean 'precision'?"
    assert nearest("zebra", ["precision", "placement"]) == ""
