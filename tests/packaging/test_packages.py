"""What is installed is what is on disk: packages, links, ``py.typed``, the wheel."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

SIBLINGS = ("transports", "bindings", "stress")
"""The rooms that lie beside pccl/ and are installed inside it."""
STUDIES = "pccl.stress.studies"
"""Commands for a checkout, which are not installed."""


PAGE = ("page.html", "page.css", "page.js")
"""Files of the page that a master serves."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules_on_disk() -> dict[str, Path]:
    """Every Python file of ours: its place in the wheel -> its place in the checkout."""
    found: dict[str, Path] = {}
    for room in ("pccl", *SIBLINGS):
        for folder, subfolders, files in os.walk(ROOT / room):  # does not follow the links
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            for name in files:
                if name.endswith(".py"):
                    path = (Path(folder) / name).relative_to(ROOT)
                    installed = path if room == "pccl" else Path("pccl") / path
                    found[installed.as_posix()] = path
    return found


def packages_on_disk() -> dict[str, Path]:
    """Every package of ours: its name -> its folder, relative to the root."""
    return {
        installed.removesuffix("/__init__.py").replace("/", "."): path.parent
        for installed, path in modules_on_disk().items()
        if path.name == "__init__.py"
    }


def test_packages_are_those_on_disk(project: dict[str, Any]) -> None:
    listed: list[str] = project["tool"]["setuptools"]["packages"]
    on_disk = [name for name in packages_on_disk() if not name.startswith(STUDIES)]
    assert sorted(listed) == sorted(on_disk), "mend [tool.setuptools] packages"


def test_a_folder_named_like_the_package_does_not_hide_it(tmp_path: Path) -> None:
    """As a clone of this repository does for a script beside it."""
    (tmp_path / "pccl").mkdir()
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import pccl; print(pccl.Communicator.__module__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("pccl.communicator\n", "")


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in modules_on_disk().values()}
    assert folders - set(packages_on_disk().values()) == set(), "__init__.py is missing"


@pytest.mark.parametrize("room", SIBLINGS)
def test_link_leads_to_the_room(room: str) -> None:
    link = ROOT / "pccl" / room
    if os.name == "nt" and not link.is_symlink():
        pytest.skip("a checkout without symbolic links")
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{room}"
    assert link.resolve() == ROOT / room


def test_types_are_announced(project: dict[str, Any]) -> None:
    assert (ROOT / "pccl" / "py.typed").is_file()
    assert project["tool"]["setuptools"]["package-data"]["pccl"] == ["py.typed"]


def test_wheel_made_from_the_sdist_holds_every_module_once(tmp_path: Path) -> None:
    """Built offline, in a copy, the way a release is: sdist first, the wheel out of that."""
    pytest.importorskip("build")
    copy, out = tmp_path / "copy", tmp_path / "out"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for room in ("pccl", *SIBLINGS):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=no_caches)

    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr

    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    code = {name for name in names if ".dist-info/" not in name}
    studies = STUDIES.replace(".", "/") + "/"
    modules = {name for name in modules_on_disk() if not name.startswith(studies)}
    page = {f"pccl/observe/page/{name}" for name in PAGE}
    sites = {f"pccl/stress/emulator/sites/{name}.toml" for name in ("aws10", "gcp12", "home8")}
    assert code == {*modules, "pccl/py.typed", *page, *sites}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert any(name.endswith("/entry_points.txt") for name in names)
