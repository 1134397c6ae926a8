"""A small convolutional network learns scikit-learn's handwritten digits, with a mistake in its schedule.

    python -m gradtracer.demo.train --name digits --result accuracy.json

At step `MILESTONE` the schedule should divide the learning rate by 100; a gamma of 100 instead of 0.01 multiplies it.
Adam then moves every weight by about 0.1 a step, the loss leaps, and most rectifiers never fire again: taking the
learning rate back no longer helps, the weights have to come back too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradtracer import FlowTracker

NUM_STEPS = 800
MILESTONE = 300
BATCH_SIZE = 64
NUM_TRAIN = 1400
# Digits train faster than a person can follow: no step is done in less.
MIN_STEP_S = 0.012


def digits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images ``[n, 1, 8, 8]`` and labels ``[n]`` for training, then for testing."""
    pixels, digit = load_digits(return_X_y=True)
    order = torch.randperm(len(digit), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    labels = torch.tensor(digit)[order]
    return images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:]


def network() -> nn.Module:
    """About 21,000 parameters; untrained it guesses one digit in ten."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(name: str, seed: int, num_steps: int, milestone: int, min_step_s: float) -> float:
    """Train with the faulty schedule; returns the accuracy on the test images."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[milestone], gamma=100)  # meant: 0.01
    with FlowTracker(model, optimizer, track_interval=20, run_name=name) as tracker:
        for _ in range(num_steps):
            started = time.monotonic()
            batch = torch.randint(NUM_TRAIN, (BATCH_SIZE,))
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            # Inside the step, as a larger model would take it: a wait between steps would be reported as one for data.
            time.sleep(max(0.0, min_step_s - (time.monotonic() - started)))
            optimizer.step()
            schedule.step()
            tracker.step(loss=loss.item())
    with torch.no_grad():
        return (model(test_images).argmax(1) == test_labels).double().mean().item()


def main() -> None:
    """Train, and write the accuracy to a file."""
    parser = argparse.ArgumentParser(description="Train on digits, with a mistake in the schedule.")
    parser.add_argument("--name", default="digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--milestone", type=int, default=MILESTONE)
    parser.add_argument("--min-step-s", type=float, default=MIN_STEP_S)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    accuracy = train(options.name, options.seed, options.steps, options.milestone, options.min_step_s)
    options.result.write_text(json.dumps({"accuracy": accuracy}), encoding="utf-8")


if __name__ == "__main__":
    main()
