"""Put `with FlowTracker(model)` around a loop that knows nothing of it.

Steps come from the optimizer's hook and the loss from the backward call. Here the learning rate is far too high.
"""

import torch
from torch import nn

from gradtracer import FlowTracker


def train(model: nn.Module) -> float:
    """Somebody's training loop; returns the last loss."""
    inputs = torch.randn(512, 16)
    targets = inputs @ torch.randn(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loss = torch.tensor(0.0)
    for _ in range(200):
        batch = torch.randint(512, (64,))
        loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(0)
network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
with FlowTracker(network, run_name="context-manager") as tracker:
    train(network)
    tracker.report()
    top, *_ = tracker.explain_failure()

assert top.code == "learning_rate_too_high", f"expected learning_rate_too_high, got {top.code}"
