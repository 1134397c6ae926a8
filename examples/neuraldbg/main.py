"""Ask why a deep sigmoid network does not learn: its gradients vanish on the way to the first layers.

The derivative of a sigmoid is at most 1/4, so each of the ten layers passes on less than a quarter of the gradient.
"""

import torch
from torch import nn

from gradtracer import NeuralDbg

torch.manual_seed(0)
inputs = torch.randn(256, 16)
labels = (inputs.sum(1) > 0).long()

blocks = [module for _ in range(10) for module in (nn.Linear(16, 16), nn.Sigmoid())]
model = nn.Sequential(*blocks, nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with NeuralDbg(model, run_name="neuraldbg") as dbg:
    for _ in range(300):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    top, *_ = dbg.explain_failure()

print(f"{top.code} ({top.probability:.0%}), root {top.layer}")
print(top.explanation)
print("affected, root first:", ", ".join(top.affected_layers))

assert top.code == "vanishing_gradient", f"expected vanishing_gradient, got {top.code}"
assert top.layer == "0", f"expected the root to be the first layer, got {top.layer}"
