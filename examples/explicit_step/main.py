"""Call `tracker.step` after `optimizer.step`: the plainest way to use the tracker.

A healthy run, to see what one looks like: the report says so, and no event asks for attention.
"""

import torch
from torch import nn

from gradtracer import FlowTracker

torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs @ torch.randn(16, 1) + 0.1 * torch.randn(512, 1)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
tracker = FlowTracker(model, optimizer, track_interval=20, run_name="explicit-step")

losses = []
for _ in range(300):
    batch = torch.randint(512, (64,))
    loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tracker.step(loss=loss.item())
    losses.append(loss.item())

tracker.report()
hypotheses = tracker.explain_failure()
tracker.close()

assert losses[-1] < losses[0] / 10, f"expected the loss to fall tenfold, got {losses[0]:.3g} to {losses[-1]:.3g}"
assert hypotheses[0].code == "healthy", f"expected a healthy run, got {hypotheses[0].code}"
