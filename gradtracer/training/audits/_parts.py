"""Parts of a model, by the names of their layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def whole_parts(chosen: Iterable[str], layers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The largest modules all of whose layers are chosen, with those layers, in the order of `layers`.

    Args:
        chosen: Names of layers.
        layers: All layers that count.
    """
    wanted = set(chosen)
    found: dict[str, list[str]] = {}
    for layer in layers:
        if layer not in wanted:
            continue
        part = layer
        while "." in part:
            parent = part.rpartition(".")[0]
            if all(other in wanted for other in layers if other == parent or other.startswith(f"{parent}.")):
                part = parent
            else:
                break
        found.setdefault(part, []).append(layer)
    return list(found.items())
