"""Unused codes are put where vectors are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, final_losses, healthy, live, program


class Quantizer(nn.Module):
    """Encoder, nearest code, decoder; with `moving`, codes are a buffer that follows its vectors."""

    def __init__(self, *, size: float, moving: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(10, 3), nn.Linear(3, 10)
        codes = size * torch.randn(16, 3)
        self.moving = moving
        if moving:
            self.register_buffer("codes", codes)
            self.register_buffer("counts", torch.ones(16))
        else:
            self.codebook = nn.Embedding(16, 3)
            with torch.no_grad():
                self.codebook.weight.copy_(codes)

    @property
    def table(self) -> Tensor:
        return self.codes if self.moving else self.codebook.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        chosen = torch.cdist(z.detach(), self.table.detach()).argmin(dim=1)
        q = self.codes[chosen] if self.moving else self.codebook(chosen)  # type: ignore[index]
        reconstruction = self.decoder(z + (q - z).detach())
        commitment = 0.25 * F.mse_loss(z, q.detach())
        codes = torch.zeros(()) if self.moving else F.mse_loss(q, z.detach())
        return F.mse_loss(reconstruction, x) + commitment + codes


def _training(seed: int, size: float, *, moving: bool = False) -> Program:
    torch.manual_seed(seed)
    model = Quantizer(size=size, moving=moving)
    basis = torch.randn(3, 10)

    def loss() -> Tensor:
        return model(torch.randn(64, 3) @ basis)

    return program(model, torch.optim.Adam(model.parameters(), 5e-3), loss)


def _far(seed: int) -> Program:
    return _training(seed, 30.0)


def _near(seed: int) -> Program:
    return _training(seed, 1.0)


def _moving(seed: int) -> Program:
    return _training(seed, 30.0, moving=True)


def _num_used(made: Program) -> int:
    with torch.no_grad():
        z = made.model.encoder(torch.randn(500, 10))  # type: ignore[operator]
        return len(torch.cdist(z, made.model.table).argmin(dim=1).unique())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_collapsed_codebook_is_used_again() -> None:
    without = final_losses(_far, range(3), num_steps=150)
    treated = final_losses(_far, range(3), num_steps=150, code="revive_codes", at=20, codebook="codebook")
    assert max(treated) < 0.7 * min(without)


@pytest.mark.slow
def test_a_codebook_in_use_is_not_hurt() -> None:
    assert_harmless(_near, "revive_codes", codebook="codebook")


@pytest.mark.parametrize(("make", "codebook"), [(_far, "codebook"), (_moving, "codes")])
def test_undo_leaves_no_hook_and_the_old_codes(make: object, codebook: str) -> None:
    assert_undone_exactly(make, "revive_codes", codebook=codebook)  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "codebook"), [(_far, "codebook"), (_moving, "codes")])
def test_most_codes_are_used_at_once(make: object, codebook: str) -> None:
    made = make(0)  # type: ignore[operator]
    with live(made) as run:
        run.train(10)
        assert _num_used(made) <= 4
        run.apply("revive_codes", codebook=codebook)
        assert _num_used(made) >= 10


def test_a_code_that_falls_out_of_use_is_moved_after_its_patience() -> None:
    made = _near(0)
    with live(made) as run:
        run.train(5)
        run.apply("revive_codes", codebook="codebook", patience=4)
        with torch.no_grad():
            made.model.codebook.weight[3] = 1e3  # type: ignore[index,union-attr]
        run.train(3)
        assert float(made.model.codebook.weight.detach()[3].abs().max()) > 100  # type: ignore[index,union-attr]
        run.train(2)
        assert float(made.model.codebook.weight.detach()[3].abs().max()) < 100  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"codebook": "nothing"}, "no embedding and no parameter"),
        ({"codebook": "codebook", "encoder": "x"}, "no layer 'x'"),
        ({"codebook": "codebook", "patience": 0}, "patience"),
    ],
)
def test_what_is_no_codebook_is_refused(parameters: dict[str, object], message: str) -> None:
    with live(_near(0)) as run, pytest.raises(BadParameter, match=message):
        run.preview("revive_codes", **parameters)  # type: ignore[arg-type]


def test_an_encoder_that_cannot_be_told_is_asked_for() -> None:
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="0 layers put out vectors"):
        run.apply("revive_codes", codebook="0")
