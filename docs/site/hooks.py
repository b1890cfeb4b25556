"""Pages of the site that are made when it is built, and links that differ from those on GitHub.

* README.md, CHANGELOG.md and others of their folder become pages.
* Each module that users import gets a page of its docstrings; all commands share one of their help.
* Source files that the docs link to become pages, too.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pccl.cli.main import group

ROOT = Path(__file__).parents[2]
MODULES = (
    "pccl", "pccl.aio", "pccl.errors", "pccl.checkpoint", "pccl.cuda", "pccl.progress",
    "pccl.publishing",
    "pccl.bindings.diloco", "pccl.bindings.gradient_averager", "pccl.bindings.data",
    "pccl.bindings.trainers", "pccl.bindings.ray", "pccl.bindings.events",
    "pccl.bindings.consumers", "pccl.bindings.trackers", "pccl.torch", "pccl.observe.events",
    "pccl.observe.listeners",
)  # fmt: skip
STUBS: dict[str, tuple[str, ...]] = {
    "transformers": ("TrainerCallback",),
    "lightning.pytorch": ("Callback",),
    "ray": (),
    "ray.util.collective.collective_group.base_collective_group": ("BaseGroup",),
}
"""Base classes from libraries that building the site does not install."""

_MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|exc|attr):<code>~?([\w.]+)(?:\(\))?</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs``."""

    def add(path: str, text: str) -> None:
        files.append(File.generated(config, path, content=text))

    for original, path in _MOVED.items():
        add(path, _relinked((ROOT / original).read_text("utf-8"), original, path))
    for name, bases in STUBS.items():
        stub: Any = ModuleType(name)
        vars(stub).update({base: type(base, (), {}) for base in bases})
        sys.modules[name] = stub
    seen: set[str] = set()
    index = ["# Reference", "", "From the docstrings. [The overview](../api.md) is shorter.", ""]
    for name in MODULES:
        module = importlib.import_module(name)
        add(f"reference/{name}.md", _page_of(module, seen))
        index.append(f"- [`{name}`]({name}.md): {_first_line(module)}")
    add("reference/commands.md", "\n".join(["# Commands", "", *_commands(group, "pccl")]))
    add("reference/index.md", "\n".join([*index, "- [Commands](commands.md): `--help` of all"]))
    for source in sorted(_linked_sources(files)):
        language = {".py": "python", ".yaml": "yaml", ".sh": "sh"}.get(source.suffix, "text")
        text = source.read_text("utf-8")
        path = source.relative_to(ROOT)
        add(f"source/{path}.md", f"# {path.name}\n\n`{path}`\n\n````{language}\n{text}\n````\n")
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Change the links of a page in ``docs`` to where their targets are on the site."""
    if page.file.generated_by is not None:
        return markdown
    return _relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Turn the references in docstrings into links, if the site has their targets."""
    return _ROLE.sub(
        lambda found: (
            f'<autoref identifier="{found[1]}" optional>'
            f"<code>{found[1].rpartition('.')[2]}</code></autoref>"
        ),
        html,
    )


def _relinked(text: str, source: str, page: str) -> str:
    """Return the text of a file of the repository, with links that fit a page of the site."""
    return _LINK.sub(lambda found: _on_site(found[1], source, page), text)


def _on_site(link: str, source: str, page: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target in _MOVED:
        target = _MOVED[target]
    elif target.startswith("docs/"):
        target = target.removeprefix("docs/")
    else:
        target = f"source/{target}.md"
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def _linked_sources(files: Files) -> Iterator[Path]:
    found: set[Path] = set()
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for path in [*pages, *(ROOT / name for name in _MOVED)]:
        for link in _LINK.findall(path.read_text("utf-8")):
            target = (path.parent / link).resolve()
            if (
                target.is_file()
                and target.name not in _MOVED
                and ROOT / "docs" not in target.parents
            ):
                found.add(target)
    yield from found


def _page_of(module: Any, seen: set[str]) -> str:
    """Return the page of a module: its docstring, then its public names that have no page yet."""
    lines = [f"# {module.__name__}", "", f"::: {module.__name__}", "    options:"]
    lines += [
        "      members: false",
        "      show_root_heading: false",
        "      show_root_toc_entry: false",
        "",
    ]
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    for name in sorted(names):
        thing = getattr(module, name)
        home = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"
        if home.startswith("pccl.") and home not in seen:
            seen.add(home)
            _show_signatures(thing)
            lines += [f"::: {home}", ""]
    return "\n".join(lines)


def _show_signatures(kind: Any) -> None:
    """Make inspection show the signatures that ``pccl._api.signatures`` gives to methods."""
    for base in getattr(kind, "__mro__", ()):
        for method in vars(base).values():
            if hasattr(method, "__signature__"):
                vars(method).pop("__wrapped__", None)


def _first_line(module: Any) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def _commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[str]:
    context = click.Context(
        command, parent=parent, info_name=name, terminal_width=88, max_content_width=88,
        **command.context_settings,
    )  # fmt: skip
    yield from (f"## {context.command_path}", "", "```text", command.get_help(context), "```", "")
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None:
                yield from _commands(found, inner, context)
