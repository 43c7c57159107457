"""Errors a user can cause. Owns nothing else; every package may import it."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Wrong usage or input. The message is one line: where, what was found, what is allowed. Commands exit with 2."""


class RunError(RuntimeError):
    """A run that could not be carried to its end. Commands exit with 1."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """`InputError` for a name that does not exist, with the nearest known one and the whole list."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
