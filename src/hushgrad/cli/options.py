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


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Tell the target from the options, `--name value` or `--name=value`.

    Args:
        arguments: the words of the command line that are no options of the command itself.

    Returns:
        The target, or None if there is none, and the options by the names of parameters. An option
        without a value is "true".

    Raises:
        ValueError: there are two targets, or an option with one hyphen.

    >>> split_arguments(["mnist", "--clip", "abadi", "--views=4"])
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
                # A value may begin with one hyphen, as negative numbers do, but not with two.
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


def arguments_for(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    offered: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """The keyword arguments for a function, from what the user gave and what we can offer.

    Args:
        function: what is to be called.
        given: options by the names of parameters; text is converted to the parameter's type.
        offered: further values, of which those are taken that the function has parameters for.
        name: what the user calls the function, for messages.

    Raises:
        ValueError: an option has no parameter, a text is not of its type, or a parameter without
            a default has no value.

    >>> def recipe(*, epsilon: float, seed: int = 0): ...
    >>> arguments_for(recipe, {"epsilon": "3"}, offered={"seed": 7, "data": None}, name="recipe")
    {'epsilon': 3.0, 'seed': 7}
    """
    parameters = inspect.signature(function).parameters
    hints = _hints(function)
    found: dict[str, Any] = {}
    for option, value in given.items():
        # Never ignored: a misspelt --epsilon would otherwise train with the default one.
        if option not in parameters:
            takes = ", ".join(option_name(p) for p in parameters) or "none"
            raise ValueError(
                f"expected options that {name} takes ({takes}), got {option_name(option)}; leave "
                "it out"
            )
        text = isinstance(value, str)
        found[option] = _convert(value, hints.get(option, str), option) if text else value
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


def _convert(text: str, hint: Any, option: str) -> Any:
    """The text as the first of the annotated types that takes it."""
    kinds = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    for kind in sorted(kinds, key=lambda kind: kind is str):  # text is anything: last
        try:
            return _convert_to(kind, text)
        except ValueError:
            continue
    wanted = " or ".join(_kind_name(kind) for kind in kinds)
    raise ValueError(f"expected {option_name(option)} as {wanted}, got {text!r}; see its recipe")


def _convert_to(kind: Any, text: str) -> Any:
    if kind is bool:  # bool("false") is True
        if text.lower() not in _YES + _NO:
            raise ValueError
        return text.lower() in _YES
    if typing.get_origin(kind) is typing.Literal:
        values = {str(value): value for value in typing.get_args(kind)}
        if text not in values:
            raise ValueError
        return values[text]
    if kind in (int, float, Path) or (isinstance(kind, type) and issubclass(kind, Enum)):
        return kind(text)
    return text


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(member.value) for member in kind)
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
