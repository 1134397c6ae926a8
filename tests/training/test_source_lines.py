"""Programs as users write them, run as they are: the lines that compute the loss and build the optimizer are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradtracer.diagnosis import diagnose
from gradtracer.home import list_run_directories
from gradtracer.journal import Journal
from gradtracer.records import OptimizerDescription, SourceLocation
from gradtracer.series import Series

IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn
from gradtracer import FlowTracker

torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(16, 4), torch.randn(16, 1)
"""

# The line with the mark `# loss` computes the loss, the one with `# optimizer` builds the optimizer. Without a mark
# nothing may be named.
PROGRAMS = {
    "module_level": """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # optimizer
tracker = FlowTracker(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)  # loss
    loss.backward()
    optimizer.step()
    tracker.step(loss)
""",
    "function_that_computes_the_loss": """
model = nn.Linear(4, 1)

def compute(model, batch):
    out = model(batch)
    error = out - y
    return error.square().mean()  # loss

def train():
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)  # optimizer
    with FlowTracker(model):
        for i in range(3):
            loss = compute(model, x)
            (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

train()
""",
    "method_and_attributes": """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(  # optimizer
            self.model.parameters(),
            lr=1e-3,
        )
        self.tracker = FlowTracker(self.model, self.optimizer)

    def objective(self, inputs, targets):
        if len(inputs) == 0:
            return None
        outputs = self.model(inputs)
        loss = F.l1_loss(outputs, targets)  # loss
        return loss

    def fit(self):
        for _ in range(3):
            loss = self.objective(x, y)
            loss = loss * 0.5
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.tracker.step(loss.item())

Trainer().fit()
""",
    "aliases": """
from torch.nn.functional import mse_loss as distance
from torch.optim import SGD as Descent
model = nn.Linear(4, 1)
opt = Descent(model.parameters(), lr=0.1)  # optimizer
with FlowTracker(model):
    for _ in range(3):
        opt.zero_grad()
        total = 0.0
        total += distance(model(x), y)  # loss
        total.backward()
        opt.step()
""",
    "optimizer_from_a_helper": """
def build(parameters, rate):
    decayed = [p for p in parameters if p.dim() > 1]
    return torch.optim.RMSprop(decayed, rate)  # optimizer

def step(loss, opt):
    opt.zero_grad()
    loss.backward()
    opt.step()

model = nn.Linear(4, 1)
opt = build(model.parameters(), 1e-3)
with FlowTracker(model):
    for _ in range(3):
        out = model(x)
        step(F.mse_loss(out, y), opt)  # loss
""",
    "loss_as_lambda": """
model = nn.Linear(4, 1)
loss_fn = lambda out, target: (out - target).square().mean()  # loss
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # optimizer
with FlowTracker(model):
    for _ in range(3):
        optimizer.zero_grad()
        out = model(x)
        loss = loss_fn(out, y)
        loss.backward()
        optimizer.step()
""",
    "loss_as_module_of_ones_own": """
class Focal(nn.Module):
    def forward(self, out, target):
        error = (out - target).abs()
        return (error**3).mean()  # loss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.body(inputs)

def main():
    model = Net()
    criterion = Focal()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # optimizer
    tracker = FlowTracker(model, optimizer)
    for _ in range(3):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.step()

main()
""",
    "model_that_returns_its_loss": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, inputs, targets=None):
        out = self.body(inputs)
        if targets is None:
            loss = None
        else:
            loss = F.mse_loss(out, targets)  # loss
        return out, loss

model = Net()
opt = torch.optim.SGD(model.parameters(), 0.1)  # optimizer
with FlowTracker(model):
    for _ in range(3):
        opt.zero_grad(set_to_none=True)
        out, loss = model(x, y)
        loss.backward()
        opt.step()
""",
    "scaler_and_a_table_of_functions": """
def objective(i):
    return F.mse_loss(model(x), y)  # loss

model = nn.Linear(4, 1)
parts = {"step": objective}
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # optimizer
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

def harness(parts):
    for i in range(3):
        optimizer.zero_grad()
        loss = parts["step"](i)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

with FlowTracker(model):
    harness(parts)
""",
    "closure": """
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)  # optimizer

def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)  # loss
    loss.backward()
    return loss

with FlowTracker(model):
    for _ in range(3):
        optimizer.step(closure)
""",
    "two_optimizers_of_a_class": """
a, b = nn.Linear(4, 4), nn.Linear(4, 1)
model = nn.Sequential(a, b)
first = torch.optim.SGD(a.parameters(), 0.1)  # optimizer
second = torch.optim.SGD(b.parameters(), 0.1)  # optimizer
tracker = FlowTracker(model, [first, second])
for _ in range(3):
    loss = F.mse_loss(model(x), y)  # loss
    loss.backward()
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
    tracker.step(loss)
""",
    "choices_that_the_source_does_not_tell": """
import sys
kinds = {"sgd": torch.optim.SGD}
model = nn.Linear(4, 1)
opt = kinds["sgd"](model.parameters(), 0.1)
with FlowTracker(model):
    for _ in range(3):
        opt.zero_grad()
        out = model(x)
        if len(sys.argv) > 1:
            loss = F.l1_loss(out, y)
        else:
            loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
""",
    "optimizers_that_look_alike": """
def build(model):
    return torch.optim.SGD(model.parameters(), 0.1)

def build_slow(model):
    return torch.optim.SGD(model.parameters(), 0.01)

model = nn.Linear(4, 1)
opt = build(model)
with FlowTracker(model):
    for _ in range(3):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()  # loss
        opt.step()
""",
}


def _recorded(home: Path) -> Series:
    (directory,) = list_run_directories(home)
    with Journal(directory) as journal:
        return Series.from_journal(journal)


def _run(arguments: list[str], tmp_path: Path) -> Series:
    root = Path(__file__).parents[2]
    variables = {**os.environ, "GRADTRACER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return _recorded(tmp_path / "home")


def _sources(series: Series) -> tuple[SourceLocation | None, list[SourceLocation | None]]:
    assert series.model is not None
    optimizers = [o for o in series.observations if isinstance(o, OptimizerDescription)]
    return series.model.loss_source, [o.source for o in optimizers]


def _marked(program: str, mark: str) -> list[int]:
    return [i for i, line in enumerate(program.splitlines(), 1) if line.endswith(f"# {mark}")]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_lines_of_loss_and_optimizer_are_named(name: str, tmp_path: Path) -> None:
    program = IMPORTS + PROGRAMS[name]
    path = tmp_path / "train.py"
    path.write_text(program)
    loss, optimizers = _sources(_run(["train.py"], tmp_path))
    assert ([loss.line] if loss else []) == _marked(program, "loss"), loss
    assert sorted({o.line for o in optimizers if o}) == _marked(program, "optimizer"), optimizers
    assert {s.file for s in (loss, *optimizers) if s} <= {str(path)}


@pytest.mark.slow
def test_a_program_without_a_file_has_no_lines(tmp_path: Path) -> None:
    assert _sources(_run(["-c", IMPORTS + PROGRAMS["module_level"]], tmp_path)) == (None, [None])


# Each has a fault that must be mended in the source, at the line with the mark.
FAULTY = {
    "loss_activation_mismatch": """
def objective(out, labels):
    return F.cross_entropy(out.softmax(1), labels)  # here

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with FlowTracker(model):
    for i in range(30):
        optimizer.zero_grad()
        loss = objective(model(x), torch.arange(16) % 3)
        loss.backward()
        optimizer.step()
""",
    "missing_optimizer_params": """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model[0].parameters(), 0.01)  # here
with FlowTracker(model):
    for i in range(60):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
""",
    "zero_grad_missing": """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with FlowTracker(model):
    for i in range(60):
        loss = F.mse_loss(model(x), y)
        loss.backward()  # here
        optimizer.step()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", FAULTY)
def test_a_fault_of_the_source_is_pointed_at_where_it_is_mended(code: str, tmp_path: Path) -> None:
    program = IMPORTS + FAULTY[code]
    (tmp_path / "train.py").write_text(program)
    first = diagnose(_run(["train.py"], tmp_path))[0]
    assert first.code == code
    assert first.advice
    assert first.source is not None
    assert (first.source.file, [first.source.line]) == (str(tmp_path / "train.py"), _marked(program, "here"))
