"""Every byte we hold is reserved here, under a tag, before it is allocated.

The ledger knows budgets and sums, nothing of tensors. Non-model data is not ours to allocate; what the plan
expects of it is kept as a *level*, so that reservations and level together never pass the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ebbtide.errors import BudgetError, IntegrityError
from ebbtide.units import format_size

SNAPSHOT = "snapshot"
"""The tag of what is copied so that it can be written later."""


AVERAGE = "average"
"""The tag of averages of the weights."""


class Ledger:
    def __init__(
        self,
        budgets: Mapping[str, int],
        sharers: int = 1,
        wish: str = "",
        most: int = 0,
        from_host: bool = False,
    ) -> None:
        """`sharers`: processes among which the machine's host and SSD are divided. `wish`: the device's budget grows as
        it is needed (`least`, `half`), up to `most` bytes; `from_host`: both are RAM, and the host's shrinks by it."""
        self.budgets, self.sharers = dict(budgets), sharers
        self.set = dict(budgets)
        """As they were set; the device's may grow, at the host's cost."""
        self.wish, self._most, self._from_host = wish, most, from_host
        self.reserved = dict.fromkeys(budgets, 0)
        self.level = dict.fromkeys(budgets, 0)
        self._expected = dict.fromkeys(budgets, 0)
        self.peak = dict.fromkeys(budgets, 0)
        self._needed = dict.fromkeys(budgets, 0)
        self.tags: dict[str, dict[str, int]] = {tier: defaultdict(int) for tier in budgets}
        self.tag_peaks: dict[str, dict[str, int]] = {tier: defaultdict(int) for tier in budgets}

    @property
    def device_alone(self) -> bool:
        """Whether the device is the only tier: nothing can leave it."""
        return not self.budgets["host"] and not self.budgets["ssd"]

    def asked(self, tier: str, count: int) -> int:
        """Of what users set, for `count` bytes of it here."""
        return count * (1 if tier == "device" else self.sharers)

    def room(self, tier: str) -> int:
        """Bytes that may still be reserved; negative where the level has risen over what is left."""
        return self.budgets[tier] - self.reserved[tier] - self.level[tier]

    def stretch(self, tier: str, short: int) -> bool:
        """Gives the device so much more, where its budget is found and not set; whether it could."""
        if not self.wish or tier != "device" or short <= 0 or self.budgets["device"] + short > self._most:
            return False
        if self._from_host:
            if short > self.room("host"):
                return False
            self.budgets["host"] -= short
        self.budgets["device"] += short
        return True

    def reserve(self, tier: str, tag: str, count: int) -> None:
        short = count - self.room(tier)
        if short > 0 and not self.stretch(tier, short):
            raise BudgetError(
                f"{tier}: {format_size(count)} for {tag} do not fit: {format_size(self.budgets[tier])} budget, "
                f"{format_size(self.reserved[tier])} reserved ({self.describe(tier)}), "
                f"{format_size(self.level[tier])} for non-model data; short by {format_size(short)}",
                tier=tier,
                short=self.asked(tier, short),
                advice=f"raise {tier}.memory by {self.asked(tier, short)} bytes, or use a smaller batch, sequence or "
                "chunk_size",
            )
        self.reserved[tier] += count
        tags = self.tags[tier]
        tags[tag] += count
        self.tag_peaks[tier][tag] = max(self.tag_peaks[tier][tag], tags[tag])
        self._look(tier)

    def release(self, tier: str, tag: str, count: int) -> None:
        if self.tags[tier][tag] < count:
            raise IntegrityError(
                f"{tier}: {count} bytes of {tag} released, but only {self.tags[tier][tag]} are reserved"
            )
        self.reserved[tier] -= count
        self.tags[tier][tag] -= count

    def spare(self, tier: str) -> int:
        """Bytes that nothing has needed so far, but snapshots."""
        return self.budgets[tier] - self._needed[tier]

    def _look(self, tier: str) -> None:
        self.look_back(tier, self.reserved[tier] + self._expected[tier])

    def look_back(self, tier: str, now: int) -> None:
        """What was held at some time, non-model data among it."""
        self.peak[tier] = max(self.peak[tier], now)
        self._needed[tier] = max(self._needed[tier], now - self.tags[tier][SNAPSHOT])

    def count_anew(self) -> None:
        """Peaks are those from now on."""
        for tier in self.peak:
            self.peak[tier] = self.reserved[tier] + self._expected[tier]

    def set_level(self, tier: str, count: int, guess: bool = False, beside: int = 0) -> None:
        """A guess keeps room free, but is no use of the tier: it does not count in the peak. `beside`: what other passes
        that are under way take."""
        expected, before = beside + (0 if guess else count), self._expected[tier]
        self.level[tier], self._expected[tier] = count + beside, expected
        if expected > before:
            self._look(tier)

    def is_guess(self, tier: str) -> bool:
        return self._expected[tier] < self.level[tier]

    def describe(self, tier: str) -> str:
        held = {tag: count for tag, count in self.tags[tier].items() if count}
        return ", ".join(f"{tag} {format_size(count)}" for tag, count in held.items()) or "nothing"

    def check(self) -> None:
        for tier, tags in self.tags.items():
            if sum(tags.values()) != self.reserved[tier] or any(count < 0 for count in tags.values()):
                raise IntegrityError(
                    f"{tier}: tags {dict(tags)} do not add up to {self.reserved[tier]} reserved"
                )
