"""The wheel: one for every CPython, and no compiler needed where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def pip(*arguments: object, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tree, so that nothing is left in the tree itself."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", out, tree)
    (made,) = out.glob("*.whl")
    return made


def test_it_is_for_every_cpython_from_the_oldest_on(wheel: Path) -> None:
    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "kvadmit/_vmm_cuda.abi3.so" in names
    assert {"kvadmit/_vmm_cuda.pyi", "kvadmit/py.typed", "kvadmit/vllm/shapes.json"} <= set(names)


def test_it_installs_and_loads_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    target, empty = tmp_path / "site", tmp_path / "bin"
    empty.mkdir()
    pip(
        "install", "--no-index", "--no-deps", "--target", target, wheel, PATH=str(empty), CC="false"
    )
    code = (
        "import kvadmit._vmm_cuda as extension, kvadmit.vmm_cuda as driver\n"
        "print(extension.__file__)\n"
        "try: driver.probe(0, library='libcuda-none.so.1')\n"
        "except driver.UnsupportedError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target), "PATH": str(empty)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, said = done.stdout.splitlines()
    assert loaded.startswith(str(target))
    assert said.startswith("no NVIDIA driver")
