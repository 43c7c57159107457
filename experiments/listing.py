"""`infsim list`: what can be named in a configuration, one line each."""

from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from experiments.config import SECTIONS, SYSTEMS
from perfmodel.errors import unknown

Lines = Iterator[tuple[str, str]]


def listing(kind: str) -> list[tuple[str, str]]:
    """(name, one line) of every name of a kind. Raises InputError."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    return list(KINDS[kind]())


def catalogue_of(kind: str) -> Callable[[], Lines]:
    def lines() -> Lines:
        from experiments.catalogue import listing as entries

        yield from entries(kind).items()

    return lines


def systems() -> Lines:
    for name, (layout, placement, text) in SYSTEMS.items():
        yield name, f"{text} (layout {layout}, placement {placement})"


def policies() -> Lines:
    from experiments.policies import REGISTRIES

    for kind, registry in REGISTRIES.items():
        for name, policy in registry.items():
            yield f"{kind}: {name}", first_line(policy)
        yield f"{kind}: file.py:Class", "a class of yours (see perfmodel.policies)"


def first_line(policy: Any) -> str:
    return str(policy.__doc__ or "").strip().partition("\n")[0]


def generators() -> Lines:
    from traces import GENERATORS

    yield from GENERATORS.items()


def formats() -> Lines:
    from traces import FORMATS

    yield from FORMATS.items()


def packs() -> Lines:
    from experiments.packs import listing as entries

    yield from entries().items()


def keys() -> Lines:
    """Every key of a configuration: type, default, meaning."""
    parents = {section.partition(".")[0] for section in SECTIONS}
    for section, model in SECTIONS.items():
        section_name, _, variant = section.partition(".")
        for key, field in model.model_fields.items():
            path = f"{section_name}.{key}" if section_name else key
            if path not in parents:
                meaning = " ".join((field.description or "").split())
                name = f"{path} [{variant}]" if variant else path
                yield name, f"{type_of(field.annotation)}, {default_of(field)}: {meaning}"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"default {'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def type_of(annotation: Any) -> str:
    """A type as a reader of YAML calls it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(type_of(member) for member in arguments))
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "text",
        dict: "mapping",
        list: "list",
        NoneType: "null",
    }
    return names.get(origin or annotation, str(annotation))


KINDS: dict[str, Callable[[], Lines]] = {
    "models": catalogue_of("models"),
    "gpus": catalogue_of("gpus"),
    "links": catalogue_of("links"),
    "engines": catalogue_of("engines"),
    "systems": systems,
    "policies": policies,
    "generators": generators,
    "traces": formats,
    "packs": packs,
    "keys": keys,
}
