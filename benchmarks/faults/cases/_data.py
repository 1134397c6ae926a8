"""Shared helpers for the fault cases: seeded data, batches and the case dict."""
import gzip
import io
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.environ.get("FAULT_DATA", os.path.join(os.path.dirname(HERE), "data"))
torch.set_num_threads(1)


def case(model, optimizer, step, steps, truth, fixed, metric=None, run_step=None):
    """metric: optional callable -> float, larger is better, evaluated after training."""
    t = dict(category="healthy", layer=None, step=None) if fixed else dict(truth)
    d = dict(model=model, optimizer=optimizer, step=step, steps=steps, truth=t, metric=metric)
    if run_step is not None:
        d["owns_loop"] = True
        d["run_step"] = run_step
    return d


def pick(n, bs, step, seed=0):
    g = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randint(0, n, (bs,), generator=g)


def digits():
    """scikit-learn's 8x8 digits, in [0,1]; first 1400 train, 397 test (fixed permutation)."""
    path = os.path.join(DATA, "digits8x8.npz")
    if os.path.exists(path):
        z = np.load(path)
    else:
        from sklearn.datasets import load_digits
        z = dict(zip("xy", load_digits(return_X_y=True)))
    x = torch.tensor(z["x"].reshape(-1, 64).astype(np.float32) / 16)
    y = torch.tensor(z["y"].astype(np.int64))
    p = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = x[p], y[p]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def mnist(n=4000):
    z = np.load(os.path.join(DATA, "mnist_10k.npz"))
    p = np.random.RandomState(0).permutation(len(z["y"]))[: n + 1000]
    x = torch.tensor(z["x"][p].astype(np.float32) / 255)[:, None]
    y = torch.tensor(z["y"][p].astype(np.int64))
    return x[:n], y[:n], x[n:], y[n:]


def california(scale=True, raw_missing=False):
    """raw_missing=True: AveBedrms is NaN in the 207 rows whose total_bedrooms the teaching CSV lacks."""
    with gzip.open(os.path.join(DATA, "california_housing.csv.gz"), "rt") as f:
        a = np.loadtxt(io.StringIO(f.read()), delimiter=",", skiprows=1, dtype=np.float64)
    x, y = a[:, :8].copy(), a[:, 8].copy()
    p = np.random.RandomState(1).permutation(len(x))
    if raw_missing:
        miss = np.loadtxt(os.path.join(DATA, "california_missing_rows.txt"), dtype=int)
        x[miss, 3] = np.nan
    x, y = x[p], y[p]
    if scale:
        x = (x - np.nanmean(x, 0)) / np.nanstd(x, 0)
        y = (y - y.mean()) / y.std()
    n = 16512
    t = lambda v: torch.tensor(v, dtype=torch.float32)
    return t(x[:n]), t(y[:n]), t(x[n:]), t(y[n:])


def shakespeare(n=200_000):
    with gzip.open(os.path.join(DATA, "tinyshakespeare.txt.gz"), "rt") as f:
        s = f.read()
    chars = sorted(set(s))
    m = {c: i for i, c in enumerate(chars)}
    return torch.tensor([m[c] for c in s[:n]]), len(chars)


def chars_batch(ids, bs, T, step, seed=0):
    i = pick(len(ids) - T - 2, bs, step, seed)
    b = torch.stack([ids[j : j + T + 1] for j in i.tolist()])
    return b[:, :-1], b[:, 1:]


def interactions(users=200, items=300, d=6, per=20, seed=3):
    """Synthetic implicit feedback: low-rank taste times a power-law popularity. -> pairs, held-out pairs"""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(users, d, generator=g)
    v = torch.randn(items, d, generator=g)
    pop = -0.8 * torch.log(torch.arange(1, items + 1).float())
    s = u @ v.T + 0.5 * pop + 0.5 * torch.randn(users, items, generator=g)
    top = s.topk(per, 1).indices
    perm = torch.randperm(per, generator=g)
    top = top[:, perm]
    uu = torch.arange(users)[:, None].expand(-1, per)
    tr = torch.stack([uu[:, : per - 4].reshape(-1), top[:, : per - 4].reshape(-1)], 1)
    te = torch.stack([uu[:, per - 4 :].reshape(-1), top[:, per - 4 :].reshape(-1)], 1)
    return tr, te


def acc(model, x, y, eval_mode=True):
    was = model.training
    model.train(not eval_mode)
    with torch.no_grad():
        r = (model(x).argmax(1) == y).float().mean().item()
    model.train(was)
    return r


def r2(model, x, y):
    was = model.training
    model.eval()
    with torch.no_grad():
        p = model(x).reshape(-1)
        r = 1 - ((p - y) ** 2).mean() / y.var(unbiased=False)
    model.train(was)
    return r.item()


def auc(score, label):
    o = torch.argsort(score)
    rank = torch.empty(len(score), dtype=torch.double)
    rank[o] = torch.arange(1, len(score) + 1, dtype=torch.double)
    pos = label > 0.5
    n1, n0 = pos.sum().item(), (~pos).sum().item()
    return ((rank[pos].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)).item()
