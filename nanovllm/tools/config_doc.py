"""Writes docs/config.md from the docstrings below the fields of `Config` and `SamplingParams`.

`python -m nanovllm.tools.config_doc` writes the file; `--check` exits with 1 if it is stale.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from nanovllm.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
DOC_PATH = _PACKAGE.parent / "docs" / "config.md"
_HEAD = """\
<!-- Written by `python -m nanovllm.tools.config_doc`: edit the docstrings in the source. -->
# Options

An option that `LLM` does not know, or a value out of range in either table, raises `ConfigError`;
its message says what is allowed.
"""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass as its source has it."""

    name: str
    type: str
    """Markdown: the alternatives, each as code."""
    default: str
    """Markdown; empty if there is none."""
    text: str
    """The docstring below the field, on one line."""


def render() -> str:
    """Return the text that docs/config.md should have.

    Raises:
        ConfigError: a field has no docstring below it.
    """
    return "\n".join(
        [
            _HEAD,
            *_section(_PACKAGE / "config.py", "Config", 'LLM(model="demo", **options)'),
            *_section(_PACKAGE / "sampling_params.py", "SamplingParams", "SamplingParams(...)"),
        ]
    )


def read_fields(source: str, class_name: str) -> tuple[str, list[Field]]:
    """Return the docstring of a dataclass and its public fields, in the order of the source.

    Args:
        source: text of a Python module; it is parsed, not run.
        class_name: a class of that module. Names of types that the module assigns, or imports from
            another of this package that does, stand for what was assigned.

    Raises:
        ConfigError: there is no such class, or a field of it has no docstring.
    """
    body = ast.parse(source).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return ast.get_docstring(node) or "", list(_fields(node, _aliases(body)))
    raise ConfigError(f"there is no class {class_name}")


def is_current(path: Path) -> bool:
    """Return whether the file at `path` has the text that `render` gives."""
    return path.is_file() and path.read_text(encoding="utf-8") == render()


def _section(path: Path, class_name: str, title: str) -> Iterator[str]:
    text, fields = read_fields(path.read_text(encoding="utf-8"), class_name)
    yield f"## `{title}`\n\n{text}\n\n| name | type | default | meaning |\n|---|---|---|---|"
    for field in fields:
        cells = (f"`{field.name}`", field.type, field.default, field.text)
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


def _aliases(body: Seq[ast.stmt]) -> dict[str, ast.expr]:
    """Return what the names stand for that a module assigns, itself or where it imports them."""
    found: dict[str, ast.expr] = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.ImportFrom(module=str(module), names=names):
                path = _PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
                if path.is_file():
                    theirs = _aliases(ast.parse(path.read_text(encoding="utf-8")).body)
                    found |= {x.name: theirs[x.name] for x in names if x.name in theirs}
    return found


def _fields(node: ast.ClassDef, aliases: Mapping[str, ast.expr]) -> Iterator[Field]:
    for statement, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if not (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            raise ConfigError(f"{node.name}.{name} has no docstring below it")
        yield Field(
            name=name,
            type=_one_of([f"`{part}`" for part in _alternatives(statement.annotation, aliases)]),
            default="" if statement.value is None else f"`{_text(statement.value)}`",
            text=" ".join(below.value.value.split()),
        )


def _alternatives(annotation: ast.expr, aliases: Mapping[str, ast.expr]) -> list[str]:
    """Return the members of a union or `Literal`, or the one type that it is."""
    match annotation:
        case ast.Name(id=name) if name in aliases:
            return _alternatives(aliases[name], aliases)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _alternatives(left, aliases) + _alternatives(right, aliases)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return [_text(value) for value in values]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=value):
            return [_text(value)]
    return [_text(annotation)]


def _one_of(parts: list[str]) -> str:
    return " or ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return json.dumps(node.value, ensure_ascii=False)
    return ast.unparse(node)


def main() -> None:
    """Command line: write docs/config.md of the checkout, or check it."""
    parser = argparse.ArgumentParser("python -m nanovllm.tools.config_doc", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is stale")
    arguments = parser.parse_args()
    if not DOC_PATH.parent.is_dir():
        parser.exit(1, f"{DOC_PATH.parent} is not a directory: run this in a checkout\n")
    if not arguments.check:
        DOC_PATH.write_text(render(), encoding="utf-8")
    elif not is_current(DOC_PATH):
        parser.exit(1, f"{DOC_PATH} is stale: run python -m nanovllm.tools.config_doc\n")


if __name__ == "__main__":
    main()
