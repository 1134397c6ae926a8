"""The plug-in seam: importing a package registers every rule in it, one file each."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar


class Coded(Protocol):
    """What a registry holds: classes with a code."""

    code: ClassVar[str]


C = TypeVar("C", bound=type[Coded])


class Registry(Generic[C]):
    """Classes by their code, in order of code.

    Args:
        kind: What they are, for error messages, e.g. ``"detector"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._found: dict[str, C] = {}

    def register(self, cls: C) -> C:
        """Class decorator: add the class under its code.

        Raises:
            ValueError: If the code is taken, or is not the name of the class's module.
        """
        code, module = cls.code, cls.__module__.rpartition(".")[2]
        if code in self._found:
            raise ValueError(f"two classes claim the {self.kind} code {code!r}: {self._found[code]!r} and {cls!r}")
        if code != module:
            raise ValueError(f"the {self.kind} {code!r} stands in {module}.py: expected {code}.py")
        self._found[code] = cls
        return cls

    def load(self, package: str) -> None:
        """Import every module of the package but those that begin with an underscore or are named `base`."""
        paths = importlib.import_module(package).__path__
        for module in sorted(m.name for m in pkgutil.iter_modules(paths)):
            if not module.startswith("_") and module != "base":
                importlib.import_module(f"{package}.{module}")

    def __getitem__(self, code: str) -> C:
        return self._found[code]

    def __contains__(self, code: object) -> bool:
        return code in self._found

    def __iter__(self) -> Iterator[C]:
        return iter(dict(sorted(self._found.items())).values())

    def __len__(self) -> int:
        return len(self._found)

    @property
    def codes(self) -> list[str]:
        """All codes, sorted."""
        return sorted(self._found)


def docstring_sections(cls: type) -> Mapping[str, str]:
    """The sections of a rule's docstring by their heading (`What`, `Why`, ...); the summary is under the empty one."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in (inspect.getdoc(cls) or "").splitlines():
        if line.endswith(":") and not line.startswith(" ") and line[:-1].replace(" ", "").isalpha():
            current = line[:-1]
            sections[current] = []
        else:
            sections[current].append(line)
    return {heading: inspect.cleandoc("\n".join(lines)).strip() for heading, lines in sections.items()}
