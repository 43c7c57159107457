"""The one error of this package, and the libraries that only some of its loaders need."""

from importlib import import_module
from types import ModuleType


class ModelError(ValueError):
    """A model's file, configuration or tokenizer is wrong. One line: where, what was found, what is allowed.

    The commands turn it into their own error for wrong input (`infreal.generate.model_input`).
    """


def require(package: str) -> ModuleType:
    """Import a library that only some files need. Raises ModelError saying what to install."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ModelError(f"reading this model needs the package {package}: pip install {package}") from error


def one_line(error: Exception) -> str:
    """What a library said, as a part of our one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
