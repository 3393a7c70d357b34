from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from ebbtide.config import Config, DeviceConfig, OptimizerConfig
from ebbtide.errors import ConfigError

PUBLISHED = """
precision = "bf16"
master = "auto"
layout = "chunk"
chunk_size = "auto"
placement = "auto"
eviction = "farthest-next-use"
prefetch = true
warmup_share = 0.2
nonfinite = "stop"
updates = "exact"
max_staleness = 4
accumulate = 1
unmanaged = []
host_modules = []
[optimizer]
name = "adamw"
lr = 1e-3
betas = [0.9, 0.999]
eps = 1e-8
weight_decay = 0.01
[device]
kind = "auto"
memory = "auto"
[host]
memory = "auto"
[ssd]
folder = ""
memory = "0"
"""
"""The keys and defaults that are promised: this text may grow, never change. Once it did: lr is now that of
torch.optim."""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_published_file_is_the_defaults(tmp_path: Path) -> None:
    assert Config.read(write(tmp_path, "run.toml", PUBLISHED)) == Config() == Config.read(None)
    assert Config().clip is None


def test_what_is_left_out_follows_from_the_rest() -> None:
    """torch's decay for the rule; SSD as large as it is where a folder is named; clip = 0 is off."""
    rules = [Config.read({"optimizer": {"name": name}}) for name in ("adamw", "adam")]
    assert [config.optimizer.weight_decay for config in rules] == [0.01, 0]
    assert Config().with_({"optimizer.name": "adam"}).optimizer.weight_decay == 0
    asked = Config.read({"optimizer": {"weight_decay": 0.1}})
    assert asked.with_({"optimizer.name": "adam"}).optimizer.weight_decay == 0.1
    assert (Config.read({"ssd": {"folder": "/a"}}).ssd.memory, Config().ssd.memory) == ("auto", 0)
    assert Config().with_({"ssd.folder": "/a"}).ssd.memory == "auto"
    assert Config.read({"ssd": {"folder": "/a", "memory": 0}}).with_({"ssd.folder": "/b"}).ssd.memory == 0
    assert Config.read({"clip": 0}) == Config() and Config.read(Config().to_dict()) == Config()


def test_every_source_reads_the_same(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "precision": "fp32",
        "clip": 1,
        "chunk_size": "64MiB",
        "unmanaged": ["lm_head.*"],
        "threads": 2,
        "poison": True,
        "optimizer": {"lr": 1, "betas": [0, 0.95]},
        "device": {"memory": "24GB"},
        "ssd": {"memory": "1TB", "folder": "/scratch"},
    }
    config = Config.read(values)
    assert Config.read(config) is config
    assert Config.read(write(tmp_path, "a.json", json.dumps(values))) == config
    toml = (
        'precision="fp32"\nclip=1\nchunk_size="64MiB"\nunmanaged=["lm_head.*"]\nthreads=2\npoison=true\n'
        "[optimizer]\nlr=1\nbetas=[0, 0.95]\n[device]\nmemory='24GB'\n"
        "[ssd]\nmemory='1TB'\nfolder='/scratch'\n"
    )
    assert Config.read(str(write(tmp_path, "a.toml", toml))) == config
    assert config.chunk_size == 64 * 2**20
    assert config.device.memory == 24 * 10**9
    assert config.ssd.memory == 10**12
    assert config.optimizer == OptimizerConfig(lr=1.0, betas=(0.0, 0.95))
    assert isinstance(config.optimizer.lr, float)
    assert config.unmanaged == ("lm_head.*",)


def test_round_trip_through_json() -> None:
    for config in (
        Config(),
        Config(clip=2.0, threads=3, unmanaged=("a", "b"), device=DeviceConfig("cpu", 5)),
    ):
        assert Config.read(json.loads(json.dumps(config.to_dict()))) == config


def test_one_folder_or_several() -> None:
    found = {}
    for given in ("", [], "/a", ["/a"], ["/a", "/b"], Path("/a"), [Path("/a"), "/b"]):
        config = Config.read({"ssd": {"folder": given, "checksums": True, "endurance": "600TB"}})
        assert Config.read(json.loads(json.dumps(config.to_dict()))) == config
        assert (config.ssd.checksums, config.ssd.endurance) == (True, 600 * 10**12)
        found[repr(given)] = config.ssd.folder
    assert list(found.values()) == [(), (), ("/a",), ("/a",), ("/a", "/b"), ("/a",), ("/a", "/b")]
    assert (Config().ssd.checksums, Config().ssd.endurance) == (False, 0)


def test_configs_are_values() -> None:
    assert hash(Config()) == hash(Config())
    with pytest.raises(FrozenInstanceError):
        Config().clip = 1.0  # type: ignore[misc]


def test_settings_not_built_yet_are_read() -> None:
    assert Config.read({"updates": "lock-free", "ssd": {"memory": "1GB"}}).updates == "lock-free"


def test_with_changes() -> None:
    config = Config().with_({"device.memory": "1GB", "optimizer.lr": 0.5, "clip": 1.0})
    assert (config.device.memory, config.optimizer.lr, config.clip) == (10**9, 0.5, 1.0)
    assert config.optimizer.eps == 1e-8
    assert config.with_({"clip": None}).clip is None
    assert Config().clip is None
    with pytest.raises(
        ConfigError, match=r"unknown config key 'device.memry'; did you mean 'device.memory'\?"
    ):
        config.with_({"device.memry": "1GB"})
    with pytest.raises(ConfigError, match=r"unknown config key 'devise'; did you mean 'device'\?"):
        config.with_({"devise.memory": "1GB"})
    with pytest.raises(ConfigError, match=r"unknown config key 'precision.memory'"):
        config.with_({"precision.memory": "1GB"})


@pytest.mark.parametrize(
    ("precision", "master", "resolved"),
    [
        ("bf16", "auto", "split"),
        ("bf16", "split", "split"),
        ("bf16", "separate", "separate"),
        ("fp16", "auto", "separate"),
        ("fp16", "separate", "separate"),
        ("fp32", "auto", "none"),
    ],
)
def test_master(precision: str, master: str, resolved: str) -> None:
    assert Config(precision=precision, master=master).resolved_master == resolved


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precison": "bf16"}, "unknown config key 'precison'; did you mean 'precision'?"),
        ({"optimizer": {"beta": 1}}, "unknown config key 'optimizer.beta'; did you mean 'optimizer.betas'?"),
        ({"lr": 1}, "unknown config key 'lr'; did you mean 'optimizer.lr'?"),
        ({"memory": "1GB"}, "unknown config key 'memory'; did you mean 'device.memory'?"),
        ({"ssd": {"dir": "x"}}, "unknown config key 'ssd.dir'; known here: folder, memory, checksums, endurance"),
        ({1: 2}, "unknown config key '1'; known here: precision, master,"),
        ({"path": "x"}, "unknown config key 'path'"),
        ({"precision": "bf15"}, "'bf16', 'fp16', 'fp32', found 'bf15'; did you mean 'bf16'?"),
        ({"precision": 16}, "'precision': expected one of 'bf16', 'fp16', 'fp32', found 16"),
        ({"precision": ["bf16"]}, "'precision': expected one of 'bf16', 'fp16', 'fp32', found ['bf16']"),
        ({"master": "none"}, "'master': expected one of 'auto', 'split', 'separate', found 'none'"),
        ({"layout": "pages"}, "found 'pages'; did you mean 'page'?"),
        ({"placement": "gpu"}, "'placement': expected one of 'auto', 'host', 'static', found 'gpu'"),
        ({"eviction": "LRU"}, "'eviction': expected one of 'farthest-next-use', 'lru', 'list-order', found"),
        ({"nonfinite": "skip"}, "'nonfinite': expected one of 'stop', 'continue'"),
        ({"updates": "in_backward"}, "found 'in_backward'; did you mean 'in-backward'?"),
        ({"prefetch": 1}, "'prefetch': expected true or false, found 1"),
        ({"poison": "yes"}, "'poison': expected true or false, found 'yes'"),
        ({"warmup_share": 0}, "'warmup_share': expected a share in (0, 1], found 0"),
        ({"warmup_share": 1.1}, "'warmup_share': expected a share in (0, 1], found 1.1"),
        ({"max_staleness": 0}, "'max_staleness': expected a whole number of at least 1, found 0"),
        ({"accumulate": 0}, "'accumulate': expected a whole number of at least 1, found 0"),
        ({"accumulate": 2.0}, "'accumulate': expected a whole number of at least 1, found 2.0"),
        ({"accumulate": True}, "'accumulate': expected a whole number of at least 1, found True"),
        ({"clip": -1}, "'clip': expected a number of at least zero, found -1"),
        ({"clip": "1"}, "'clip': expected a number of at least zero, found '1'"),
        ({"clip": float("inf")}, "'clip': expected a number of at least zero, found inf"),
        ({"unmanaged": "lm_head"}, "'unmanaged': expected a list of name patterns, such as ['lm_head.*']"),
        ({"host_modules": [1]}, "'host_modules': expected a list of name patterns"),
        ({"threads": 0}, "'threads': expected 'auto' or a whole number of at least 1, found 0"),
        ({"chunk_size": "64mb"}, "'chunk_size': expected 'auto' or a size such as '24GB' or '512MiB'"),
        ({"chunk_size": "64mb"}, "found '64mb'; did you mean '64MB'?"),
        ({"chunk_size": 0}, "a size such as '24GB' or '512MiB' above zero, found 0"),
        ({"device": {"memory": "Auto"}}, "'device.memory': expected 'auto', 'least', 'half' or a size"),
        ({"device": {"memory": "Auto"}}, "found 'Auto'; did you mean 'auto'?"),
        ({"host": {"memory": -1}}, "'host.memory': expected 'auto' or a size such as '24GB'"),
        ({"ssd": {"memory": -1}}, "'ssd.memory': expected 'auto' or a size"),
        ({"ssd": {"folder": 3}}, "'ssd.folder': expected a folder or a list of folders, such as '/scratch'"),
        ({"ssd": {"folder": ["/a", ""]}}, "'ssd.folder': expected a folder or a list of folders"),
        ({"ssd": {"folder": ["/a", 3]}}, "['/disk0', '/disk1'], found ['/a', 3]"),
        ({"ssd": {"checksums": 1}}, "'ssd.checksums': expected true or false, found 1"),
        ({"ssd": {"endurance": "auto"}}, "'ssd.endurance': expected a size such as '24GB' or '512MiB', found"),
        ({"ssd": {"endurance": "600 tbw"}}, "'ssd.endurance': expected a size"),
        ({"device": "cuda"}, "'device': expected a table of settings ([device]), found 'cuda'"),
        ({"device": {"kind": "gpu"}}, "'device.kind': expected one of 'auto', 'cuda', 'cpu', found 'gpu'"),
        ({"optimizer": {"name": "adagrad"}}, "expected one of 'adamw', 'adam', 'lion', 'sgd', found 'adagrad'"),
        ({"clip": 1.0, "clip_value": 0.5}, "'clip_value': expected one of clip and clip_value, found both"),
        ({"clip_value": -1}, "'clip_value': expected a number of at least zero"),
        ({"optimizer": {"name": "sgd", "eps": 1e-8}}, "'optimizer.eps': expected none: the rule 'sgd' reads lr"),
        ({"optimizer": {"lr": -1}}, "'optimizer.lr': expected a number of at least zero, found -1"),
        ({"optimizer": {"lr": float("nan")}}, "'optimizer.lr': expected a number of at least zero"),
        ({"optimizer": {"lr": 10**400}}, "'optimizer.lr': expected a number of at least zero"),
        ({"optimizer": {"betas": [0.9, 1]}}, "'optimizer.betas[1]': expected a number in [0, 1), found 1"),
        ({"optimizer": {"betas": [-0.1, 0.9]}}, "'optimizer.betas[0]': expected a number in [0, 1)"),
        ({"optimizer": {"betas": [0.9]}}, "'optimizer.betas': expected a pair of numbers, found [0.9]"),
        ({"optimizer": {"eps": 0}}, "'optimizer.eps': expected a number above zero, found 0"),
        ({"optimizer": {"weight_decay": -1}}, "'optimizer.weight_decay': expected a number of at least"),
        ({"precision": "fp16", "master": "split"}, "'master': expected 'separate' or 'auto' with"),
        ({"precision": "fp32", "master": "split"}, "'master': expected 'auto' with precision 'fp32'"),
        ({"precision": "fp32", "master": "separate"}, "'master': expected 'auto' with precision 'fp32'"),
        ({"updates": "in-backward", "clip": 1}, "'clip': expected no clipping with updates 'in-backward'"),
        ({"updates": "in-backward", "accumulate": 2}, "'accumulate': expected 1 with updates 'in-backward'"),
    ],
)  # fmt: skip
def test_bad_settings(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.read(values)


def test_a_config_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"'optimizer\.eps': expected a number above zero"):
        OptimizerConfig(eps=-1)
    with pytest.raises(ConfigError, match="'precision': expected one of"):
        Config(precision="int8")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "precision = bf16", "not valid TOML: Invalid value (at line 1"),
        ("a.json", "{'a': 1}", "not valid JSON: Expecting property name"),
        ("a.json", "[1]", "expected a table of settings, found a list"),
        ("a.yaml", "precision: bf16", "expected a config file that ends in .toml or .json"),
        ("a.toml", "clip = -1.0", "config key 'clip': expected a number of at least zero, found -1.0"),
    ],
)
def test_bad_files_name_the_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {message}")):
        Config.read(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file: No such file"):
        Config.read(tmp_path / "missing.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot read the config file"):
        Config.read(tmp_path / "folder.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.read(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="expected a Config, a dict or the path"):
        Config.read(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"threads": 100_000}, "threads"),
        ({"threads": 10**10}, "threads"),
        ({"accumulate": 10**40}, "accumulate"),
        ({"ssd": {"memory": 10**40}}, "ssd.memory"),
        ({"device.memory": "1GB"}, "did you mean 'memory' in the table 'device'"),
        ({"x.precision": "bf16"}, "did you mean 'precision'"),
        ({"precision": "BF16"}, "did you mean 'bf16'"),
    ],
)
def test_what_no_machine_has_and_what_is_nearly_right(values: dict[str, Any], said: str) -> None:
    """Some ended in the library's own error, or in a crash of its threads."""
    with pytest.raises(ConfigError, match=said):
        Config.read(values)
