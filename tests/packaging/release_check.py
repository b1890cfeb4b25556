"""``make release-check``: the checks of a release, besides the tests of the tree.

* Two builds of sdist and wheel give the same bytes; ``twine`` accepts them.
* With each Python that is found here, the wheel is installed in a fresh environment, and two
  processes reduce, without torch.
* The unit tests pass with the lowest version of each dependency that they need.

The files, and an SBOM (CycloneDX) of the wheel and its dependencies, are then in ``dist/``.
"""

from __future__ import annotations

import filecmp
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from tests.support.paths import ROOT

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
SMOKE = """
import numpy as np, pccl
with pccl.Communicator() as comm:
    comm.connect(min_peers=2)
    x = np.full(5, float(comm.rank), np.float32)
    comm.all_reduce(x)
    assert (x == 1).all()
"""
LOWEST = "torch,demo,metrics,page,tensorboard,upnp"
"""Extras whose lowest versions the unit tests need."""


def main() -> None:
    """Check everything; the first failure ends it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with step("build twice"):
            wheel = built(folder)
        for version, python in interpreters():
            with step(f"install and run with Python {version}"):
                smoke(wheel, python, folder / version)
        with step("unit tests with the lowest versions"):
            with_lowest(wheel, folder / "lowest")
    print(f"release check: passed; see {ROOT / 'dist'}")


@contextmanager
def step(name: str) -> Generator[None]:
    """Print what begins, and how long it took."""
    began_s = time.monotonic()
    print(f"release check: {name} ...", flush=True)
    yield
    print(f"release check: {name}: {time.monotonic() - began_s:.0f} s", flush=True)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command outside the tree; its output is shown if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}{done.stderr[-4000:]}")
    return done.stdout


def built(folder: Path) -> Path:
    """Build sdist and wheel of the last commit twice; return the wheel."""
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    for name in ("first", "second"):
        run("git", "clone", "--quiet", ROOT, folder / name)
        run(sys.executable, "-m", "build", "--outdir", folder / f"{name} dist", folder / name)
        dated(next((folder / f"{name} dist").glob("*.tar.gz")))
    made = sorted((folder / "first dist").iterdir())
    assert len(made) == 2, made
    for path in made:
        again = folder / "second dist" / path.name
        if not filecmp.cmp(path, again, shallow=False):
            sys.exit(f"two builds of {path.name} differ")
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    shutil.copytree(folder / "first dist", ROOT / "dist")
    return next(path for path in made if path.suffix == ".whl")


def dated(sdist: Path) -> None:
    """Give everything in an sdist the time of the commit; setuptools takes that of the build."""
    at = int(os.environ["SOURCE_DATE_EPOCH"])
    packed = BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for entry in sorted(old.getmembers(), key=lambda one: one.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = at, 0, 0, "", ""
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=at) as zipped:
        zipped.write(packed.getvalue())


def interpreters() -> Iterator[tuple[str, str]]:
    """Find the Pythons of this machine, in PATH and where pyenv puts them."""
    for version in VERSIONS:
        name = f"python{version}"
        places = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/{name}"))
        found = str(places[-1]) if places else shutil.which(name)
        if found is None:
            print(f"release check: Python {version} is not installed: skipped", flush=True)
        else:
            yield version, found


def environment(python: str, folder: Path, *options: str | Path) -> Path:
    """Make a virtual environment, and install into it; return its commands."""
    run(python, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet")
    run(*pip, "--disable-pip-version-check", *options)
    return folder / "bin"


def smoke(wheel: Path, python: str, folder: Path) -> None:
    """Install the wheel as users do, and reduce between two processes."""
    commands = environment(python, folder, wheel)
    program = (commands / "python", "-W", "error", "-c", SMOKE)
    run(commands / "pccl", "launch", "-n", "2", "--fail-fast", "--", *program, cwd=folder)
    if (version := f"{sys.version_info[0]}.{sys.version_info[1]}") == folder.name:
        bill = ROOT / "dist" / f"sbom-python{version}.json"
        run(
            *(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"),
            *("--pyproject", ROOT / "pyproject.toml", "-o", bill, commands / "python"),
        )


def lowest() -> Iterator[str]:
    """Return the lowest version of each dependency that ``LOWEST`` needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for one in [*project["dependencies"], *(r for name in LOWEST.split(",") for r in extras[name])]:
        name, version = re.match(r"([\w.-]+)>=([\w.]+)", one).groups()  # type: ignore[union-attr]
        yield f"{name}=={version}"


def with_lowest(wheel: Path, folder: Path) -> None:
    """Run the unit tests with the lowest versions, on the lowest Python that is found."""
    pins = folder.with_suffix(".txt")
    pins.write_text("\n".join(sorted(set(lowest()))))
    _, python = next(interpreters())
    tools = ("pytest>=8.2", "hypothesis>=6.100", "pytest-xdist>=3.6", "pyyaml>=6", "build")
    commands = environment(python, folder, "-c", pins, f"{wheel}[{LOWEST}]", *tools)
    tree = folder / "tree"
    run("git", "clone", "--quiet", ROOT, tree)
    studies = "--ignore=tests/unit/stress/studies"  # they are not in the wheel
    run(commands / "pytest", "-q", "-n", "2", "tests/unit", studies, cwd=tree)


if __name__ == "__main__":
    main()
