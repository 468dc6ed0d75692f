"""Checks each call into the library against its annotations: types everywhere, shapes where stated.

jaxtyping's own hook wraps every function, those within functions at each call; that made the tests
three times as slow. Few functions state shapes, and only those need its bookkeeping of dimensions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

# An int where a float is expected is no error, as PEP 484 has it.
checked_types = beartype(conf=BeartypeConf(is_pep484_tower=True))
checked_shapes = jaxtyping.jaxtyped(typechecker=checked_types)


def states_shapes(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether an annotation of a function, or of a class's fields, names a type of jaxtyping."""
    if isinstance(node, ast.ClassDef):
        found = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
    else:
        spec = node.args
        each = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg)
        found = [one.annotation for one in each if one and one.annotation]
        found += [node.returns] if node.returns else []
    names = {part.id for one in found for part in ast.walk(one) if isinstance(part, ast.Name)}
    return any(hasattr(jaxtyping, name) for name in names)


class Decorate(ast.NodeTransformer):
    """Puts a check on every function and method of a module, and on the fields of dataclasses."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        # What is defined within it is left alone: it would be checked anew at every call.
        node.decorator_list.append(_named("shapes" if states_shapes(node) else "types", node))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            node.decorator_list.insert(
                0, _named("shapes" if states_shapes(node) else "types", node)
            )
        self.generic_visit(node)
        return node


def _named(what: str, node: ast.stmt) -> ast.expr:
    return ast.copy_location(ast.Name(f"_checked_{what}", ast.Load()), node)


class Loader(SourceFileLoader):
    """Loads a module with its checks."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = Decorate().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_checked_types=checked_types, _checked_shapes=checked_shapes)
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds the modules of some packages, to be loaded with their checks."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def check(*packages: str) -> None:
    """Check the calls into these packages, none of which must have been imported yet."""
    there = [package for package in packages if package in sys.modules]
    assert not there, f"imported before they could be checked: {there}"
    sys.meta_path.insert(0, Finder(packages))
