"""Many processes, as the command sees them: torchrun starts them, and each says by its environment which it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ebbtide.errors import ConfigError

PATIENCE = timedelta(seconds=50)
"""How long a rank waits for another before it takes it for lost."""


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def share(self, batch: int) -> int:
        """Rows of a batch that each rank takes."""
        if batch % self.size:
            raise ConfigError(
                f"--batch: expected a multiple of {self.size}, for {self.size} ranks share a batch; found {batch}"
            )
        return batch // self.size

    def rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch."""
        if self.size == 1:
            return batch
        count = {name: len(value) // self.size for name, value in batch.items()}
        return {
            name: value[self.rank * count[name] : (self.rank + 1) * count[name]]
            for name, value in batch.items()
        }

    def all(self, mine: Any) -> list[Any]:
        """What each rank has, by rank."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        from ebbtide.runtime.distributed.ranks import lost

        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, mine)
        except RuntimeError as error:
            raise lost(range(self.size), self.rank, self.size, error) from error
        return found

    def require_same(self, told: Mapping[str, Any]) -> None:
        """Ends all ranks where one was told something else: each would train on with its own."""
        if self.size > 1:
            from ebbtide.runtime.distributed.ranks import refuse_unlike

            refuse_unlike(self.all(dict(told)))

    def mean(self, values: Sequence[float]) -> float:
        """Over all values of all ranks."""
        every = [value for one in self.all(list(values)) for value in one]
        return sum(every) / len(every)


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Among the processes that torchrun started; alone where it did not. `device`: the setting."""
    from ebbtide.runtime.distributed.launch import join, launched

    size, _ = launched()
    if size == 1:
        yield World()
        return
    import torch.distributed as dist

    join(device, PATIENCE)
    try:
        yield World(dist.get_rank(), size)
    except ConfigError:
        # Nothing has begun. The group's threads must not outlive the interpreter, which would abort.
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not after an error: the others may wait for us meanwhile
