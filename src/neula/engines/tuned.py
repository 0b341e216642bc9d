"""Thresholds that ``neula tune`` has measured on this machine, in the user's cache folder: a file for each
device, driver, number of threads, and version of torch and of neula. An engine reads it once in a process;
whatever is wrong with it is said in a warning, and the shipped thresholds take its place.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import neula
from neula.engines.tuning import Tuning
from neula.kernels.whole_file import cache_folder, write_whole

MEASURED = (
    *("direct", "direct_definite", "direct_single"),
    *("queued", "queued_definite", "gram_columns", "cholesky"),
)
"""Numbers of :class:`~neula.engines.tuning.Tuning` that are measured: integers, not negative."""

Machine = Mapping[str, str | int]


def machine_of(device: torch.device) -> Machine:
    versions: dict[str, str | int] = {"torch": torch.__version__, "neula": neula.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "driver": _driver(), "cuda": str(torch.version.cuda), **versions}
    capability = torch.backends.cpu.get_cpu_capability()
    return {"device": _processor(), "driver": capability, "threads": torch.get_num_threads(), **versions}


def file_of(machine: Machine) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["device"]).lower()).strip("-") or "cpu"
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / "tuning" / f"{name}-{digest}.toml"


def read(machine: Machine) -> dict[str, int]:
    """Thresholds measured on a machine; empty if there are none, or, with a warning, if broken."""
    path = file_of(machine)
    try:
        return _checked(tomllib.loads(path.read_text("utf-8")), machine)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{path} is ignored, shipped thresholds take its place: {error}; measure again with: neula tune",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def _checked(content: Mapping[str, Any], machine: Machine) -> dict[str, int]:
    if not isinstance(content.get("thresholds"), dict):
        raise ValueError("it does not hold thresholds")
    if content.get("machine") != dict(machine):
        raise ValueError("it was measured on another machine")
    for name, value in content["thresholds"].items():
        if name not in MEASURED:
            raise ValueError(f"{name!r} is not among the thresholds that are measured")
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}, not a whole number from 0 on")
    return dict(content["thresholds"])


def write(machine: Machine, thresholds: Mapping[str, int]) -> Path:
    """Keep measurements; a process that reads meanwhile finds the old file or the new one, complete."""
    path = file_of(machine)
    sections = {"machine": machine, "thresholds": thresholds}
    # Strings and integers are written in TOML as in JSON.
    lines = [
        line
        for title, section in sections.items()
        for line in (f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in section.items()), "")
    ]
    write_whole(path, "\n".join(lines).encode())
    return path


def reset(machine: Machine) -> bool:
    """Forget what was measured; tells whether there was anything."""
    path = file_of(machine)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def tuned(shipped: Tuning, device: torch.device) -> Tuning:
    return shipped.having(**read(machine_of(device)))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def _driver() -> str:
    """Version of the kernel's driver; empty where it does not say."""
    try:
        found = re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[0] if found else ""
