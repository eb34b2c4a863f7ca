"""Search for the defaults of the anchored recipe on held-out parts of the training data; test data are not read."""

import argparse, json, sys, time
from dataclasses import replace
from pathlib import Path
import numpy as np, pandas as pd, torch
from sklearn.model_selection import train_test_split
from evalign import metrics, Confusion
from evalign.networks import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.loop import Rows
from evalign.training.trials import Trial, train_trials
from evalign.training.recipes import Recipe, Stage


def load(name, d):
    f = pd.read_parquet(d / f"{name}.parquet")
    if name == "adult":
        y = f.target.to_numpy()
        f = f.drop(columns=["income", "split", "target", "fnlwgt"])
    elif name == "creditcard":
        y = f.Class.to_numpy()
        f = f.drop(columns=["Class", "Time"])
        f["Amount"] = np.log(f.Amount + 1e-3)
    else:
        y = pd.factorize(f.target, sort=True)[0]
        f = f.drop(columns=[c for c in ("target", "split") if c in f])
    return pd.get_dummies(f).to_numpy(np.float32), y.astype(np.int64)


def gains(p, M, rounds=40):
    p = torch.tensor(p, dtype=torch.float64)
    d = p.shape[1]

    def conf(dec):
        return p.T @ torch.nn.functional.one_hot(dec, d).double() / len(p)

    def M_of(C):
        return M(Confusion(C.diagonal(), C.sum(1), C.sum(0), C.sum()))

    dec = p.argmax(1)
    C = conf(dec)
    best = (float(M_of(C)), torch.eye(d, dtype=torch.float64))
    for k in range(rounds):
        Cg = C.clone().requires_grad_()
        G = torch.autograd.grad(M_of(Cg), Cg)[0]
        dec = (p @ G).argmax(1)
        D = conf(dec)
        v = float(M_of(D))
        if v > best[0] + 1e-9:
            best = (v, G)
        C = C + 2 / (k + 3) * (D - C)
    return best[1]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--sets", nargs="+")
    a.add_argument("--configs")
    a.add_argument("--splits", type=int, default=5)
    a.add_argument("--data", type=Path, default=Path(".data"))
    a.add_argument("--out", type=Path)
    a.add_argument("--group", type=int, default=40)
    a = a.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    configs = json.loads(Path(a.configs).read_text())
    for name in a.sets:
        X, y = load(name, a.data)
        C = int(y.max()) + 1
        avg = "binary" if C == 2 else "macro"
        obj = Objective("f1", "multiclass", StepChoice("annealed"), average=avg)
        M = lambda c: metrics.f1(c, avg)

        def score(p, y, w):
            pred = p.argmax(1)
            z = torch.zeros(C, dtype=p.dtype, device=p.device)
            return M(
                Confusion(
                    z.scatter_add(0, y, w * (pred == y)), z.scatter_add(0, y, w), z.scatter_add(0, pred, w), w.sum()
                )
            )

        splits = []
        Xs = torch.zeros(a.splits and 1)
        parts = []
        for s in range(a.splits):
            strat = y if np.bincount(y).min() >= 8 else None
            dev_i, _ = train_test_split(np.arange(len(y)), test_size=0.2, random_state=s, stratify=y)
            tr, rest = train_test_split(dev_i, test_size=0.36, random_state=s, stratify=y[dev_i])
            try:
                va, te = train_test_split(rest, test_size=0.2 / 0.36, random_state=s, stratify=y[rest])
            except ValueError:
                va, te = train_test_split(rest, test_size=0.2 / 0.36, random_state=s)
            splits.append((tr, va, te))
        mu, sd = X[splits[0][0]].mean(0), X[splits[0][0]].std(0)
        sd[sd == 0] = 1
        xt = torch.tensor((X - mu) / sd, device=dev)
        yt = torch.tensor(y, device=dev)
        rows = Rows.of(xt, yt)
        by_batch = {}
        for cfg in configs:
            if name in cfg.get("only", [name]):
                by_batch.setdefault((cfg["batch"], tuple(cfg.get("hidden", (512, 256, 128)))), []).append(cfg)
        for (batch, hidden), cfgs in by_batch.items():
            for g in range(0, len(cfgs), max(1, a.group // a.splits)):
                part = cfgs[g : g + max(1, a.group // a.splits)]
                trials = [
                    Trial(
                        torch.tensor(tr),
                        torch.tensor(va),
                        Recipe("x", "", tuple(Stage(**st) for st in cfg["stages"])),
                        seed=s,
                        dropout=cfg["dropout"],
                    )
                    for cfg in part
                    for s, (tr, va, te) in enumerate(splits)
                ]
                t0 = time.time()
                res = train_trials(lambda: mlp(X.shape[1], C, hidden, 0.25), rows, trials, obj, score, batch_size=batch)
                secs = time.time() - t0
                for k, cfg in enumerate(part):
                    am, pl, nl, ep = [], [], [], []
                    for s, (tr, va, te) in enumerate(splits):
                        r = res[k * a.splits + s]
                        net = mlp(X.shape[1], C, hidden, 0.25).to(dev)
                        net.load_state_dict(r.state)
                        net.eval()
                        with torch.no_grad():
                            pv, pt = (
                                torch.cat(
                                    [net(q).double().softmax(1) for q in xt[torch.tensor(i, device=dev)].split(32768)]
                                ).cpu()
                                for i in (va, te)
                            )
                        yt_ = torch.tensor(y[te])
                        Gm = gains(pv.numpy(), M)
                        h = lambda dec: float(M(Confusion.hard(dec, yt_, C)))
                        present = np.isin(np.arange(C), y[te])
                        am.append(h(pt.argmax(1)))
                        pl.append(h((pt @ Gm).argmax(1)))
                        nl.append(float(-pt[torch.arange(len(te)), yt_].clamp_min(1e-12).log().mean()))
                        ep.append(len(r.history))
                    row = dict(
                        set=name,
                        name=cfg["name"],
                        argmax=round(np.mean(am), 4),
                        plug=round(np.mean(pl), 4),
                        se=round(np.std(pl, ddof=1) / len(pl) ** 0.5, 4),
                        nll=round(np.mean(nl), 4),
                        epochs=round(np.mean(ep), 1),
                        secs=round(secs, 1),
                        S=len(trials),
                    )
                    print(json.dumps(row), flush=True)
                    if a.out:
                        a.out.open("a").write(json.dumps(row) + "\n")


main()
