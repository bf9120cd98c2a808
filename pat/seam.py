"""A table of names of a third-party package that PAT relies on, resolved on first use and checked at start-up."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import version

Parameters = tuple[str, ...]


class SeamError(RuntimeError):
    """The package has other internals than the version that PAT was written against."""


def resolve(dotted: str):
    """The object at a dotted path: a module, or an attribute of one. Raises ImportError or AttributeError."""
    module, _, attribute = dotted.rpartition(".")
    parent = importlib.import_module(module)
    if hasattr(parent, attribute):
        return getattr(parent, attribute)
    return importlib.import_module(dotted)


def _lost(value, parameters: Parameters) -> set[str]:
    if not parameters:
        return set()
    try:
        return set(parameters) - set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return set(parameters)


def attributes(kind: type) -> set[str]:
    """What instances of a class have, as far as it can be told without one: also what its methods set on ``self``."""
    found = set(dir(kind))
    for parent in kind.__mro__:
        found |= set(vars(parent).get("__annotations__", ()))
        for member in vars(parent).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None:
                found |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return found


class Seam:
    """names: short name -> (dotted path, parameters that PAT passes; () for what is not called by keyword).

    methods: (short name of a class, method, parameters it must take), for methods that PAT overrides or wraps.
    held: (short name of a class, attributes that its instances must have).
    """

    def __init__(
        self,
        package: str,
        written_for: str,
        names: dict[str, tuple[str, Parameters]],
        methods: tuple[tuple[str, str, Parameters], ...] = (),
        held: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        self.package, self.written_for, self.names, self.methods = package, written_for, names, methods
        self.held = held

    def path(self, name: str) -> str:
        return self.names[name][0]

    def get(self, name: str):
        if name not in self.names:
            raise AttributeError(f"{name} is not in PAT's table of {self.package} names")
        return resolve(self.path(name))

    def problems(self) -> list[str]:
        """What is missing or has lost a parameter, a line each; empty if all is as expected."""
        wanted = [(dotted, dotted, parameters) for dotted, parameters in self.names.values()]
        wanted += [
            (f"{self.path(owner)}.{method}", self.path(owner), parameters) for owner, method, parameters in self.methods
        ]
        found = []
        for label, dotted, parameters in wanted:
            try:
                value = resolve(dotted)
                if label != dotted:
                    value = getattr(value, label.rpartition(".")[2])
            except (ImportError, AttributeError) as error:
                found.append(f"{label}: {error}")
                continue
            if lost := _lost(value, parameters):
                found.append(f"{label} no longer takes {', '.join(sorted(lost))}")
        for owner, wanted_of in self.held:
            try:
                lost = set(wanted_of) - attributes(resolve(self.path(owner)))
            except (ImportError, AttributeError):
                continue  # told above
            if lost:
                found.append(f"{self.path(owner)} no longer has {', '.join(sorted(lost))}")
        return found

    def require(self, owner: object, attributes: Sequence[str]) -> None:
        """Raise SeamError naming the attributes that an object of the package lacks; for what instances hold."""
        if lost := [name for name in attributes if not hasattr(owner, name)]:
            raise SeamError(
                f"{type(owner).__name__} of {self.package} {version(self.package)} lacks {', '.join(lost)}; PAT was "
                f"written against {self.package} {self.written_for}: install {self.package}=={self.written_for}"
            )

    def check(self) -> None:
        """Raise SeamError naming all that is not as expected, and the version to install."""
        if found := self.problems():
            raise SeamError(
                f"PAT was written against {self.package} {self.written_for} and finds {version(self.package)} "
                f"with other internals:\n  " + "\n  ".join(found) + f"\nInstall {self.package}=={self.written_for}."
            )
