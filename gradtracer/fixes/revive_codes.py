"""Put unused codes of a codebook where vectors are."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import all_modules, choose_one, forget_moments_at, keep, seeded
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_BATCHES = 4
_MAX_ROWS = 4096
_AGREEMENT = 0.95


class ReviveCodesParameters(FixParameters):
    """Parameters of `revive_codes`."""

    codebook: str = Field(
        min_length=1, max_length=500, description="The embedding, or the parameter or buffer, that holds the codes."
    )
    encoder: str | None = Field(
        default=None,
        max_length=500,
        description="The layer whose outputs the codes replace; by default found on captured batches.",
    )
    patience: int = Field(
        default=20, ge=1, le=100_000, description="Updates without use after which a code is put elsewhere."
    )
    noise: float = Field(
        default=0.01, ge=0, le=1, description="Noise on what a code becomes, in standard deviations of the vectors."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the random numbers.")


@FIXES.register
class ReviveCodes(Fix[ReviveCodesParameters]):
    """Replace codes that no vector chooses by vectors that the encoder puts out, now and whenever one falls out of use.

    What:
        Codes that are nearest to no vector of the captured batches, and later those that were not for `patience`
        updates, become vectors of the newest batch with a little noise. Their moments become 0; what a moving average
        keeps beside the codebook (tensors of its shape, counts by code) begins anew with them.

    Why:
        Only the nearest code is moved, so a code that is far from all vectors is never used again.

    Definition:
        Use: ``argmin_k ||z - e_k||`` for some vector z. Else ``e_k <- z_i + noise * std(z) * n``, i drawn without
        repetition while there are enough, n ~ N(0, 1).

    Safety:
        Guarded: codes that are kept for rare inputs may be taken away from them.

    Undo:
        Codes stay where they are from then on; those of before the fix are put back.

    References:
        Dhariwal et al. 2020, arXiv:2005.00341, section 3 (random restart). Williams et al. 2020, arXiv:2002.08111.
    """

    code = "revive_codes"
    title = "Revive unused codes"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    num_batches = _NUM_BATCHES
    mends = ("codebook_collapse",)
    Parameters = ReviveCodesParameters

    def preview(self, run: LiveRun, parameters: ReviveCodesParameters) -> list[Change]:
        """The codebook."""
        table, _ = _table(run, parameters.codebook)
        if parameters.encoder is not None:
            choose_one(run, parameters.encoder)
        return [Change(target=parameters.codebook, old=f"{len(table)} codes as trained", new="unused codes: vectors")]

    def apply(self, run: LiveRun, parameters: ReviveCodesParameters) -> Undo:
        """Revive, and watch over use from now on."""
        import torch

        table, beside = _table(run, parameters.codebook)
        vectors_of = _vectors_by_module(run, table)
        encoder = choose_one(run, parameters.encoder) if parameters.encoder else _find_encoder(vectors_of, table)
        if not vectors_of.get(encoder):
            raise BadParameter(
                f"{parameters.encoder} put out no vectors of width {table.shape[1]} in the captured batches"
            )
        put_back = keep(run, (table, *beside))
        generator = seeded(run, parameters.seed)
        vectors = _thinned(torch.cat(vectors_of[encoder]))
        idle = torch.full((len(table),), parameters.patience, device=table.device)
        watcher = _Watcher(table.shape[1])

        def revive(vectors: Any) -> None:
            idle.add_(1)
            idle[_nearest(vectors, table)] = 0
            idle.copy_(over_ranks(idle, "min"))
            unused = (idle >= parameters.patience).nonzero().flatten()
            if len(unused):
                _place(run, table, beside, unused, vectors, parameters.noise, generator)
                idle[unused] = 0

        def after(optimizer: Any) -> None:
            vectors, watcher.vectors = watcher.vectors, None
            if vectors is not None:
                with torch.no_grad():
                    revive(_thinned(vectors))

        with torch.no_grad():
            revive(vectors)
        handle = encoder.register_forward_hook(watcher)
        end = run.around_update(lambda optimizer: None, after)

        def undo() -> None:
            end()
            handle.remove()
            put_back()

        return undo


class _Watcher:
    """Forward hook of the encoder: keeps what it put out last while training."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.vectors: Any = None

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        rows = _as_rows(output, self.width)
        if rows is not None and output.requires_grad:
            self.vectors = rows

    def __deepcopy__(self, memo: Any) -> _Watcher:
        return _Watcher(self.width)

    def __reduce__(self) -> Any:
        return _Watcher, (self.width,)


def _place(
    run: LiveRun, table: Any, beside: list[Any], unused: Any, vectors: Any, noise: float, generator: Any
) -> None:
    import torch

    order = torch.randperm(len(vectors), generator=generator).repeat(-(-len(unused) // len(vectors)))
    chosen = vectors[order[: len(unused)].to(vectors.device)]
    drawn = torch.randn(chosen.shape, generator=generator).to(chosen)
    new = over_ranks(chosen + noise * vectors.std(dim=0) * drawn, "first").to(table.dtype)
    table[unused] = new
    for kept in beside:
        kept[unused] = new.to(kept.dtype) if kept.dim() == 2 else 1
    forget_moments_at(run, table, unused)


def _table(run: LiveRun, name: str) -> tuple[Any, list[Any]]:
    """The codes, and what the same module keeps by code beside them."""
    known = all_modules(run)
    module, tensor = known.get(name), getattr(known.get(name), "weight", None)
    if tensor is None:
        owner, _, own = name.rpartition(".")
        module = known.get(owner) if owner else run.model
        tensor = getattr(module, own, None)
    if module is None or tensor is None or getattr(tensor, "dim", lambda: 0)() != 2:
        raise BadParameter(
            f"{name[:80]!r} is no embedding and no parameter or buffer of two axes that could be a codebook"
        )
    beside = [
        b
        for b in module.buffers(recurse=False)
        if b is not tensor and b.is_floating_point() and b.shape in (tensor.shape, tensor.shape[:1])
    ]
    return tensor, beside


def _vectors_by_module(run: LiveRun, table: Any) -> dict[Any, list[Any]]:
    """What modules put out as vectors of the codes' width in captured batches, in order of their first call."""
    found: dict[Any, list[Any]] = {}

    def note(module: Any, inputs: Any, output: Any) -> None:
        rows = _as_rows(output, table.shape[1])
        if rows is not None and all(t is not table for t in (*module.parameters(False), *module.buffers(False))):
            found.setdefault(module, []).append(rows)

    handles = [m.register_forward_hook(note) for m in run.model.modules()]
    try:
        run.rehearse(_NUM_BATCHES)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _find_encoder(vectors_of: dict[Any, list[Any]], table: Any) -> Any:
    """The first module whose vectors are not rows of the table and that has weights; unique, or else to be named."""
    candidates = [
        m
        for m, rows in vectors_of.items()
        if next(m.parameters(recurse=False), None) is not None and not _are_codes(rows[0], table)
    ]
    if len(candidates) != 1:
        raise BadParameter(
            f"{len(candidates)} layers put out vectors of the codes' width, {table.shape[1]}; name the one whose "
            "outputs are replaced with encoder="
        )
    return candidates[0]


def _are_codes(rows: Any, table: Any) -> bool:
    import torch

    distance = torch.cdist(rows[:256], table.detach().float()).amin(dim=1)
    return bool((distance <= 1e-3 * table.detach().float().norm(dim=1).mean()).float().mean() >= _AGREEMENT)


def _nearest(vectors: Any, table: Any) -> Any:
    import torch

    return torch.cdist(vectors, table.detach().float()).argmin(dim=1)


def _thinned(rows: Any) -> Any:
    return rows[:: max(1, -(-len(rows) // _MAX_ROWS))]


def _as_rows(output: Any, width: int) -> Any:
    """``[n, width]`` of an output whose last axis, or second of an image, is as wide as a code; None for others."""
    if not hasattr(output, "is_floating_point") or not output.is_floating_point() or output.dim() < 2:
        return None
    if output.dim() == 4 and output.shape[1] == width:
        output = output.movedim(1, -1)
    return output.detach().float().reshape(-1, width) if output.shape[-1] == width else None
