"""A training that goes well for 300 steps; then its learning rate is far too high, until someone mends or stops it.

Takes the home of runs as its argument. The model is linear and the gradient of the loss bounded, so at the bad rate the
weights oscillate at a finite distance from the optimum, and come back within some twenty steps at the good one.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from gradtracer import FlowTracker

GOOD_RATE, BAD_RATE, BITES_AT = 0.5, 5.0, 300
# An end for a test that has lost its training; some minutes, far beyond any test.
MAX_STEPS, PACE_S = 100_000, 0.002


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(256, 20)
    targets = inputs @ torch.randn(20, 1) + 0.1 * torch.randn(256, 1)
    model = nn.Sequential(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=GOOD_RATE)
    tracker = FlowTracker(model, optimizer, track_interval=20, run_name="bounded", home=sys.argv[1])
    for step in range(MAX_STEPS):
        if step == BITES_AT:
            optimizer.param_groups[0]["lr"] = BAD_RATE
        rows = torch.randint(0, 256, (64,))
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(inputs[rows]), targets[rows])
        time.sleep(PACE_S)  # inside the step: between two steps it would be a wait for data
        loss.backward()
        optimizer.step()
        tracker.step(loss=loss.item())
    tracker.close()


if __name__ == "__main__":
    main()
