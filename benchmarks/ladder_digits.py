"""Random, supervised and MAE encoder side by side on the digits: the ladder and nearest neighbours. A CPU, minutes.

    python benchmarks/ladder_digits.py --out runs/ladder_digits --write docs/results.md

All three have the same architecture. A stopped start goes on where it stands. `--write` replaces the section of that
file; without it the section is printed.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

from vitfw.config import load
from vitfw.evaluate.ladder import order_of, recommend, table, with_spread
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


def random_encoder(folder: Path) -> Path:
    """An export of the encoder as it begins."""
    if not folder.exists():
        torch.manual_seed(0)
        model = load(["recipe=mae_digits", *MODEL_WORDS]).model
        preprocessing = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,), crop=1.0)
        export(build_model(model, num_classes=0), folder, preprocessing=preprocessing)
    return folder


def ladders(out: Path, options: argparse.Namespace) -> dict[str, tuple[Path, Path]]:
    """{name: (weights of the encoder, folder of its finished ladder)}."""
    supervised, epochs = out / "supervised", f"train.epochs={options.supervised_epochs}"
    run(["recipe=digits", *MODEL_WORDS, epochs, "eval.every_epochs=0", *MACHINE, f"out={supervised}"])
    words = [f"train.epochs={options.rung_epochs}", f"ladder.seeds={options.seeds}", *MACHINE]
    found = {}
    for name, weights in (("random", random_encoder(out / "random")), ("supervised", supervised)):
        folder = out / f"ladder-{name}"
        run(["recipe=ladder_digits", *MODEL_WORDS, f"weights={weights}", *words, f"out={folder}"])
        found[name] = weights, folder
    folder = out / "ladder-mae"  # pretraining and rungs in one command
    pretraining = [f"pretrain.train.epochs={options.mae_epochs}", "pretrain.eval.every_epochs=0"]
    run(["recipe=mae_digits_stages", *pretraining, *words, f"out={folder}"])
    return found | {"MAE": (folder / "pretrain", folder)}


def one_encoder(name: str, weights: Path, folder: Path, out: Path) -> tuple[str, str]:
    """(row of the overview, the ladder's own table and advice) of one encoder."""
    results = read_results(folder)
    words = [*DATA, "machine.workers=0", "machine.threads=1", f"features.folder={out / 'features'}"]
    neighbours = probe_place(str(weights), [*words, "methods=[knn]", "knn.neighbours=[20]"])["knn_20"]
    rungs = order_of(results)
    accuracies = [with_spread([one.scores["acc1"] for one in results if one.rung == rung], 2) for rung in rungs]
    row = " | ".join(["", name, f"{neighbours['scores']['acc1']:.2f}", *accuracies, ""]).strip()
    return row, f"### {name} encoder\n\n{table(results)}\n\n{recommend(results).text}"


def section(options: argparse.Namespace) -> str:
    """The section's Markdown."""
    out = Path(options.out)
    found = {name: one_encoder(name, *places, out) for name, places in ladders(out, options).items()}
    lines = [
        TITLE,
        "",
        "One architecture (width 96, 4 blocks, mean pooling), 1,438 training and 359 test images of 8 x 8 pixels.",
        f"Encoders: random weights; {options.supervised_epochs} supervised epochs on the same labels;",
        f"{options.mae_epochs} epochs of MAE without labels. Probe: the best of 13 heads on stored features, chosen on 256",
        f"held-out training images. Other rungs: {options.rung_epochs} epochs, last weights. Seeds: {options.seeds}. A",
        "difference under about 3 points is within the noise of this test set. From random weights so few epochs are far from",
        "enough for `last_block` and `full`, and even a random encoder keeps most of what 64 pixels say for its probe.",
        "",
        f"`python {' '.join(sys.argv)}`, commit {str(source_commit())[:9]}, torch {torch.__version__}, 1 CPU thread.",
        "",
        "| encoder | 20-NN | probe | last_block | full |",
        "| --- | --- | --- | --- | --- |",
        *(row for row, _ in found.values()),
        *(line for _, part in found.values() for line in ("", part)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs everything, then prints the section or puts it in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/ladder_digits")
    parser.add_argument("--supervised-epochs", type=int, default=40)
    parser.add_argument("--mae-epochs", type=int, default=150)
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
