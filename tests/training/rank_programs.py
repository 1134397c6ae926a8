"""Distributed training programs, two processes on one machine, and what they hand back.

``launch(program, folder)`` runs ``program(rank, folder, *arguments)`` in two processes with a gloo process group and
returns what each returned.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradtracer import FlowTracker
from gradtracer.control import ControlClient, Reply, Request
from gradtracer.home import read_manifest

SIZE = 2
BATCH = 8
DEADLINE_S = 120.0

Program = Callable[..., Any]


def launch(program: Program, folder: Path, *arguments: Any, ranks: Sequence[int] = range(SIZE)) -> list[Any]:
    """Run it on two ranks; those of `ranks` must end well in time, and what they returned is returned."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_work, args=(rank, program, str(folder), arguments), daemon=True) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        for rank in ranks:
            processes[rank].join(DEADLINE_S)
            assert processes[rank].exitcode is not None, f"rank {rank} hangs"
            assert processes[rank].exitcode == 0, (folder / f"error-{rank}").read_text()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in ranks]


def _work(rank: int, program: Program, folder: str, arguments: tuple[Any, ...]) -> None:
    path = Path(folder)
    try:
        torch.set_num_threads(1)
        os.environ["GRADTRACER_HOME"] = str(path / "home")
        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=SIZE)
        torch.save(program(rank, path, *arguments), path / f"result-{rank}")
        dist.destroy_process_group()
    except BaseException:
        (path / f"error-{rank}").write_text(traceback.format_exc())
        raise


class Distributed:
    """A small regression on two ranks, each with its half of the global batch.

    Args:
        rank: Of this process.
        wrap: `ddp`, `fsdp` or `none`.
    """

    def __init__(self, rank: int, wrap: str, *, rate: float = 1e-2, momentum: float = 0.9) -> None:
        self.rank, self.num_steps = rank, 0
        self.plain = model()
        self.model: nn.Module = self.plain
        if wrap == "ddp":
            self.model = DistributedDataParallel(self.plain)
        elif wrap == "fsdp":
            for layer in self.plain:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(self.plain)
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate, momentum=momentum)
        self.losses: list[float] = []
        self.first_rates: list[float] = []

    def step(self, factor: float = 1.0) -> float:
        x, y = batch(self.num_steps)
        mine = slice(self.rank * BATCH // SIZE, (self.rank + 1) * BATCH // SIZE)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x[mine]), y[mine]) * factor
        loss.backward()
        self.optimizer.step()
        self.num_steps += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    def train(self, steps: int, tracker: FlowTracker | None = None, factor: float = 1.0) -> None:
        for _ in range(steps):
            loss = self.step(factor)
            if tracker is not None:
                tracker.step(loss)

    def weights(self) -> list[Tensor]:
        """Whole, on every rank."""
        return [whole(p.detach()).clone() for p in self.model.parameters()]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, `[8, 6]` and `[8, 1]`."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, 6, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def ask(
    training: Distributed, tracker: FlowTracker | None, request: Request | None, extra_steps: int = 3
) -> Reply | None:
    """Train on all ranks until rank 0's request is answered; its answer there, None elsewhere."""
    reply: Future[Reply] | None = None
    with ThreadPoolExecutor(1) as pool:
        if training.rank == 0 and request is not None:
            assert tracker is not None
            client = ControlClient(read_manifest(tracker.directory))
            reply = pool.submit(client.ask, request, 60.0)
        left = extra_steps
        while True:
            going = torch.tensor([1.0 if (reply is not None and not reply.done()) or left > 0 else 0.0])
            dist.broadcast(going, 0)
            if going.item() == 0:
                break
            if reply is None or reply.done():
                left -= 1
            training.train(1, tracker)
        return reply.result() if reply is not None else None
