"""Weights for others: safetensors, an index and the config, as Hugging Face's `save_pretrained` writes them.

Tensors are taken one by one, and a file is written when it is full, so that no more than one file's are in RAM. Files
get their names when all of them are on the disk. Ranks call it together, and the first one writes.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError

from ebbtide.checkpoint import values
from ebbtide.checkpoint.folders import make_folder, sync
from ebbtide.errors import DiskError
from ebbtide.memory.disk.vectors import view
from ebbtide.memory.dtensors import is_split, split_of
from ebbtide.runtime.distributed.model_parallel import others_too
from ebbtide.runtime.distributed.ranks import all_or_none
from ebbtide.runtime.parameters.binding import dense
from ebbtide.runtime.session import Session

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
"""What an export writes; a user's `model_ema.safetensors` beside it is not."""
LARGEST = 2 << 30
"""Bytes of a file, but for a tensor that is larger."""


def export(session: Session, folder: Path, dtype: torch.dtype | None, largest: int = LARGEST) -> None:
    """`dtype`: of floating tensors; left out, that of the module."""
    made = _Export(session, folder, dtype, largest)
    made.by_the_first(partial(make_folder, folder, "export"))
    try:
        for place in range(len(made.files)):
            tensors = {key: made.value(key) for key in made.files[place]}
            made.by_the_first(partial(made.write, place, tensors))
            del tensors
        made.by_the_first(made.finish)
    finally:
        for path in made.aside if made.first else ():
            path.unlink(missing_ok=True)


def _described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As safetensors takes them where there is no NumPy; before 0.8 it took copies."""
    spec = getattr(safetensors, "TensorSpec", None)
    found: dict[str, Any] = {}
    for key, tensor in tensors.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if spec is not None:
            found[key] = spec(dtype=dtype, shape=shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
        else:
            data = bytes(view(tensor.data_ptr(), tensor.nbytes)) if tensor.nbytes else b""
            found[key] = {"dtype": dtype, "shape": shape, "data": data}
    return found


class _Export:
    def __init__(self, session: Session, folder: Path, dtype: torch.dtype | None, largest: int) -> None:
        self._session, self._folder = session, folder
        self._companions = session.companions
        self.first = (session.ranks is None or session.ranks.rank == 0) and (
            self._companions is None or self._companions.first
        )
        self._managed = set(values.names(session))
        self._tensors: dict[str, torch.Tensor] = {
            **dict(session.module.named_parameters()),  # tied ones once, by their first name
            **dict(values.persistent_buffers(session.module)),
        }
        self._dtypes = {
            key: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            for key, tensor in self._tensors.items()
        }
        self._dtype = next((one for one in self._dtypes.values() if one.is_floating_point), torch.float32)
        self.files = self._cut(largest)
        count = len(self.files)
        numbered = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._names = numbered if count > 1 else [NAME]
        self.aside = [folder / f".{name}.partial" for name in self._names]

    def _bytes(self, key: str) -> int:
        span = self._session.layout.spans.get(key)  # of an expert on another rank, the module has no elements
        if span is None or is_split(self._tensors[key]):
            return self._tensors[key].numel() * self._dtypes[key].itemsize
        return span.numel * self._dtypes[key].itemsize

    def _cut(self, largest: int) -> list[list[str]]:
        """The keys of each file."""
        files: list[list[str]] = [[]]
        held = 0
        for key in self._tensors:
            if files[-1] and held + self._bytes(key) > largest:
                files.append([])
                held = 0
            files[-1].append(key)
            held += self._bytes(key)
        return files

    def value(self, key: str) -> torch.Tensor:
        """Rounded from the master as the parameter is."""
        dtype = self._dtypes[key]
        if key not in self._managed:
            return self._tensors[key].detach().to("cpu", dtype, copy=True).contiguous()
        found, split = self._rounded(values.load(self._session, key), dtype), split_of(self._tensors[key])
        return (found if split is None else split.whole(found)).contiguous()

    def _rounded(self, found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if found.dtype == dtype:
            return found
        if found.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
            return found.to(dtype)
        rounded = torch.empty_strided(found.shape, found.stride(), dtype=dtype, device="cpu")
        self._session.updates.kernels["host"].split(dense(found), dense(rounded), None)
        return rounded

    # -- what one rank does for all -------------------------------------------------------------------

    def by_the_first(self, work: Callable[[], None]) -> None:
        """What it raises is raised on all."""
        with others_too(self._companions), all_or_none(self._session.ranks):
            if not self.first:
                return
            try:
                work()
            except (OSError, SafetensorError) as error:
                where = str(getattr(error, "filename", None) or self._folder)
                what = getattr(error, "strerror", None) or error
                raise DiskError(f"{where}: the weights could not be exported: {what}", file=where) from error

    def write(self, place: int, tensors: dict[str, torch.Tensor]) -> None:
        safetensors.serialize_file(_described(tensors), self.aside[place], {"format": "pt"})
        sync(self.aside[place])

    def finish(self) -> None:
        """Everything gets its name; what an export before left under other names goes."""
        folder, module = self._folder, self._session.module
        old = [
            path for path in folder.iterdir() if OURS.fullmatch(path.name) and path.name not in self._names
        ]
        for path, name in zip(self.aside, self._names, strict=True):
            os.replace(path, folder / name)
        if len(self._names) > 1:
            self._write_index()
        else:
            (folder / INDEX).unlink(missing_ok=True)
        for path in old:
            with suppress(OSError):
                path.unlink()
        config: Any = getattr(module, "config", None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            for one in (
                config,
                *(getattr(config, name, None) for name in getattr(config, "sub_configs", ())),
            ):
                if getattr(one, "dtype", None) is not None:
                    one.dtype = self._dtype  # `from_pretrained` takes that
            config.architectures = [type(module).__name__]
            config.save_pretrained(folder)
        generation: Any = getattr(module, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
        sync(folder)

    def _write_index(self) -> None:
        where = {key: name for name, keys in zip(self._names, self.files, strict=True) for key in keys}
        total = sum(self._bytes(key) for key in where)
        aside = self._folder / f".{INDEX}.partial"
        aside.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
        os.replace(aside, self._folder / INDEX)
