"""Random, supervised and MAE encoder side by side on the digits: the ladder, grid probe, neighbours. A CPU, minutes.

    python benchmarks/ladder_digits.py --out runs/ladder_digits --write docs/results.md

All three have the same architecture. A stopped start goes on where it stands. `--write` replaces the section of that
file; without it the section is printed.
"""

import argparse
import re
import time
from pathlib import Path

import torch

from vitfw.config import load
from vitfw.evaluate.ladder import recommend, table
from vitfw.ladder import read_results
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.preprocess import Preprocessing
from vitfw.probe_command import probe_place
from vitfw.run import source_commit
from vitfw.train import main as train_main

TITLE = "## Ladder on digits"
MODEL_WORDS = [  # of mae_digits: the other recipes have another size
    *("model.variant=mae_ti2", "model.width=96", "model.depth=4", "model.heads=3", "model.mlp_ratio=2.0"),
    *("model.pool=gap", "model.class_token=false"),
]
MACHINE = ["machine.workers=0", "machine.threads=1", "log.progress=lines"]
DATA = ["data.train=data/digits/train-*.tar", "data.val=data/digits/val-*.tar"]


def run(words: list[str]) -> None:
    """One command; stops the script where it does not finish."""
    status = train_main(words)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with status {status}")


def encoders(out: Path, options: argparse.Namespace) -> dict[str, str]:
    """{name: place of its weights}."""
    supervised, mae, random = out / "supervised", out / "mae", out / "random"
    shared = ["eval.every_epochs=0", *MACHINE]
    run(["recipe=digits", *MODEL_WORDS, f"train.epochs={options.supervised_epochs}", *shared, f"out={supervised}"])
    run(["recipe=mae_digits", f"train.epochs={options.mae_epochs}", *shared, f"out={mae}"])
    if not random.exists():
        torch.manual_seed(0)
        model = load(["recipe=mae_digits", *MODEL_WORDS]).model
        export(
            build_model(model, num_classes=0),
            random,
            preprocessing=Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,), crop=1.0),
        )
    return {"random": str(random), "supervised": str(supervised), "MAE": str(mae)}


def one_encoder(name: str, place: str, out: Path, options: argparse.Namespace) -> tuple[str, str]:
    """(row of the overview, the ladder's own table and advice) of one encoder."""
    folder = out / f"ladder-{name.lower()}"
    lengths = [f"train.epochs={options.rung_epochs}", f"ladder.seeds={options.seeds}"]
    run(["recipe=ladder_digits", *MODEL_WORDS, f"weights={place}", *lengths, *MACHINE, f"out={folder}"])
    results = read_results(folder)
    words = [
        *DATA,
        "machine.workers=0",
        "machine.threads=1",
        f"features.folder={out / 'features'}",
        "knn.neighbours=[20]",
    ]
    found = probe_place(place, [*words, "methods=[probe,knn]"])
    means = [
        sum(one.scores["acc1"] for one in results if one.rung == rung) / options.seeds
        for rung in ("probe", "last_block", "full")
    ]
    cells = [name, found["knn_20"]["scores"]["acc1"], found["probe"]["scores"]["acc1"], *means]
    row = "| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells) + " |"
    return row, f"### {name} encoder\n\n{table(results)}\n\n{recommend(results).text}"


def section(options: argparse.Namespace) -> str:
    """The section's Markdown."""
    out, started = Path(options.out), time.perf_counter()
    rows, parts = [], []
    for name, place in encoders(out, options).items():
        row, part = one_encoder(name, place, out, options)
        rows.append(row)
        parts.append(part)
    head = (
        f"{TITLE}\n\nOne architecture (width 96, 4 blocks, mean pooling), 1,438 training and 359 test images of 8 x 8 "
        f"pixels. Encoders: random weights; {options.supervised_epochs} supervised epochs on the same labels; "
        f"{options.mae_epochs} epochs of MAE without labels. Rungs: {options.rung_epochs} epochs each, "
        f"{options.seeds} seed{'s' * (options.seeds > 1)}, last weights. Grid probe and neighbours: stored features; "
        "the probe is chosen on 256 held-out training images. A difference under about 3 points is within the noise of "
        f"this test set.\n\n`python benchmarks/ladder_digits.py --out {options.out}`, commit {source_commit()}, "
        f"torch {torch.__version__}, 1 CPU thread, {(time.perf_counter() - started) / 60:.0f} minutes.\n\n"
        "| encoder | 20-NN | grid probe | ladder: probe | last_block | full |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(rows) + "\n\n" + "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs everything, then prints the section or puts it in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/ladder_digits")
    parser.add_argument("--supervised-epochs", type=int, default=60)
    parser.add_argument("--mae-epochs", type=int, default=200)
    parser.add_argument("--rung-epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", default=None, help="file whose section is replaced")
    options = parser.parse_args()
    text = section(options)
    if options.write is None:
        print(text)
        return
    path = Path(options.write)
    old = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    pattern = re.compile(rf"^{re.escape(TITLE)}$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    new = pattern.sub(lambda _: text + "\n", old) if pattern.search(old) else old.rstrip() + "\n\n" + text
    path.write_text(new.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
