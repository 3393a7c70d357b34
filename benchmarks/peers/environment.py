"""The others' packages: a virtual environment in build/peers, with the torch and transformers that are here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from provenance import ROOT

VENV = ROOT / "build" / "peers"
PYTHON = VENV / "bin" / "python"
DEEPSPEED, TORCHAO = "0.19.8", "0.18.0"
UPDATE_OPERATOR, DISK_OPERATOR = "CPUAdamBuilder", "AsyncIOBuilder"
LIBAIO = ("libaio-dev", "libaio1", "libaio1t64")
"""Debian packages with its header and its library; the last is the library's name in newer releases."""


class Missing(Exception):
    """Something that the comparison needs is not there."""


def make(disk: bool) -> None:
    """What is there already is kept. `disk`: with the operator that reads and writes NVMe."""
    operators = [UPDATE_OPERATOR, *([DISK_OPERATOR] if disk else [])]
    wanted = _wanted()
    ready = VENV / "ready.json"
    there = json.loads(ready.read_text()) if ready.exists() else {}
    if there.get("versions") != wanted:
        _install(wanted)
        there = {"versions": wanted, "operators": []}
    missing = [name for name in operators if name not in there["operators"]]
    if missing:
        if disk:
            _find_libaio()
        _compile(missing)
    there["operators"] = sorted({*there["operators"], *missing})
    ready.write_text(json.dumps(there))


def _wanted() -> dict[str, str]:
    try:
        found = {name: version(name).split("+")[0] for name in ("torch", "transformers")}
    except PackageNotFoundError as error:
        raise Missing(f"run it with ebbtide's environment (make install): {error}") from None
    return found | {"deepspeed": DEEPSPEED, "torchao": TORCHAO, "python": platform.python_version()}


def _install(wanted: dict[str, str]) -> None:
    if shutil.which("g++") is None:
        raise Missing("g++ is needed to compile DeepSpeed's operators")
    if not PYTHON.exists():
        say(f"making {VENV}")
        _run("a virtual environment", sys.executable, "-m", "venv", str(VENV))
    packages = [f"{name}=={wanted[name]}" for name in ("torch", "transformers", "torchao")]
    _pip(*packages, "ninja", "setuptools", "wheel")
    _pip("--no-build-isolation", f"deepspeed=={DEEPSPEED}")  # its set-up looks at the torch that is there


def _pip(*packages: str) -> None:
    say("installing " + " ".join(packages))
    _run("pip", str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)


def _find_libaio() -> None:
    """The header and library that the disk operator is linked with: the system's, or unpacked beside it."""
    if _links_libaio():
        return
    say("unpacking libaio")
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with tempfile.TemporaryDirectory() as folder:
            for package in LIBAIO:
                subprocess.run(
                    ["apt-get", "download", "-q", package], cwd=folder, capture_output=True, check=False
                )
            for archive in Path(folder).glob("*.deb"):
                _run("dpkg-deb", "dpkg-deb", "-x", str(archive), str(VENV / "libaio"))
    if not _links_libaio():
        raise Missing("libaio's header and library are needed (libaio-dev), and could not be downloaded")


def _links_libaio() -> bool:
    program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }"
    command = ["g++", "-x", "c++", "-", "-laio", "-o", os.devnull]
    done = subprocess.run(
        command, input=program, text=True, capture_output=True, env=variables(1), check=False
    )
    return done.returncode == 0


def _compile(operators: list[str]) -> None:
    """Ahead of the runs, so that none of them spends its time or memory on it."""
    say("compiling DeepSpeed's operators: some minutes")
    for lock in VENV.glob("extensions/*/lock"):
        lock.unlink()  # of a build that was ended: the next one would wait for it forever
    builders = " ".join(f"get_accelerator().create_op_builder('{name}').load();" for name in operators)
    program = f"from deepspeed.accelerator import get_accelerator; {builders}"
    _run("compiling DeepSpeed's operators", str(PYTHON), "-c", program)


def _run(what: str, *command: str) -> None:
    threads = len(os.sched_getaffinity(0))
    done = subprocess.run(command, capture_output=True, text=True, env=variables(threads), check=False)
    if done.returncode:
        raise Missing(f"{what} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def variables(threads: int) -> dict[str, str]:
    """What all peers run under, and what DeepSpeed needs in place of a launcher and of a system-wide libaio."""
    unpacked = VENV / "libaio" / "usr"
    libraries = [str(path.parent) for path in unpacked.glob("lib/**/libaio.so")]
    changes = {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(threads),
        "MAX_JOBS": str(threads),
        "PATH": os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(ROOT / "src"),
        "TORCH_EXTENSIONS_DIR": str(VENV / "extensions"),
        "TORCHINDUCTOR_CACHE_DIR": str(VENV / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if libraries:
        changes |= {
            "CFLAGS": f"-I{unpacked / 'include'}",
            "CPATH": str(unpacked / "include"),
            "LDFLAGS": f"-L{libraries[0]}",
            "LIBRARY_PATH": libraries[0],
            "LD_LIBRARY_PATH": libraries[0],
        }
    return {**os.environ, **changes}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
