"""Options for a recipe: `--name value`, matched with the parameters of its function."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")


def split(arguments: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The target, if there is one, and the options by name: `--name value` or `--name=value`.

    >>> split(["mnist", "--clip", "abadi", "--views=4"])
    ('mnist', {'clip': 'abadi', 'views': '4'})
    """
    target: str | None = None
    options: dict[str, str] = {}
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals:
                value = left.pop(0) if left and not left[0].startswith("--") else "true"
            options[name.replace("-", "_")] = value
        elif target is None and not word.startswith("-"):
            target = word
        else:
            raise ValueError(
                f"expected one recipe and options as --name value, got {word!r} as well; see "
                "hushgrad train --help"
            )
    return target, options


def bound(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    offered: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """The arguments for `function`: what was given, and of what is offered as much as it takes.

    Text is converted to the type of its parameter. An option that the function has no parameter
    for is refused by name.
    """
    parameters = inspect.signature(function).parameters
    hints = _hints(function)
    found: dict[str, Any] = {}
    for option, value in given.items():
        if option not in parameters:
            takes = ", ".join(option_name(p) for p in parameters) or "none"
            raise ValueError(
                f"expected options that {name} takes ({takes}), got {option_name(option)}; leave "
                "it out"
            )
        text = isinstance(value, str)
        found[option] = _converted(value, hints.get(option, str), option) if text else value
    found |= {p: v for p, v in offered.items() if p in parameters and p not in found}
    if missing := [
        p
        for p, parameter in parameters.items()
        if p not in found
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]:
        raise ValueError(
            f"expected a value for every parameter of {name} without a default, got none for "
            f"{', '.join(map(option_name, missing))}; add it"
        )
    return found


def option_name(parameter: str) -> str:
    """A parameter as an option is spelled.

    >>> option_name("noise_multiplier")
    '--noise-multiplier'
    """
    return "--" + parameter.replace("_", "-")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a name that is imported for type checkers only
        return {}


def _converted(text: str, hint: Any, option: str) -> Any:
    kinds = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    for kind in sorted(kinds, key=lambda kind: kind is str):  # text is anything: last
        try:
            return _one(text, kind)
        except ValueError:
            continue
    wanted = " or ".join(_kind_name(kind) for kind in kinds)
    raise ValueError(f"expected {option_name(option)} as {wanted}, got {text!r}; see its recipe")


def _one(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in _YES + _NO:
            raise ValueError
        return text.lower() in _YES
    if typing.get_origin(kind) is typing.Literal:
        return {str(value): value for value in typing.get_args(kind)}.get(text) or _no(text)
    if kind in (int, float, Path) or (isinstance(kind, type) and issubclass(kind, Enum)):
        return kind(text)
    return text


def _no(text: str) -> Any:
    raise ValueError(text)


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(member.value) for member in kind)
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
