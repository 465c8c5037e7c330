"""Writes constraints.txt from the virtual environment that runs this: `.venv/bin/python tools/pin.py`, after a change of dependencies.

Left out are pip, the project, and torch with what only its CUDA build brings: tools/setup.sh has its own rule for those. The sizes
in the header, which `make setup` announces, are measured: the packages are downloaded once.
"""

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
NOT_PINNED = re.compile(r"pip|perilune|torch|triton|nvidia-.*|cuda-.*")
NOT_COUNTED = ("torch", "functorch", "torchgen", "triton", "nvidia")
HEADER = """\
# Exact versions that `make setup` installs; written by tools/pin.py. torch is chosen by tools/setup.sh.
# sizes: {download} MB to download, {disk} MB installed
"""


def pins() -> list[str]:
    names = {re.sub(r"[-_.]+", "-", dist.name).lower(): dist.version for dist in importlib.metadata.distributions()}
    return [f"{name}=={version}\n" for name, version in sorted(names.items()) if not NOT_PINNED.fullmatch(name)]


def megabytes(files: list[Path]) -> int:
    return round(sum(file.lstat().st_blocks for file in files) * 512 / 1e6)


def main() -> None:
    lines = pins()
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text("".join(lines))
        wheels = Path(scratch, "wheels")
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, "-r", requirements], check=True)
        download = megabytes(list(wheels.iterdir()))
    site = Path(sysconfig.get_path("purelib"))
    disk = megabytes([file for file in site.rglob("*") if file.is_file() and file.relative_to(site).parts[0] not in NOT_COUNTED])
    CONSTRAINTS.write_text(HEADER.format(download=download, disk=disk) + "".join(lines))
    print(f"{CONSTRAINTS.name}: {len(lines)} packages, {download} MB to download, {disk} MB installed")


if __name__ == "__main__":
    main()
