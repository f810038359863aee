"""MAE on the digits, end to end: pretraining, then the same fine-tune ladder from it and from the untrained encoder.

    python benchmarks/mae_digits.py --seeds 3 --out runs/mae_digits_study

Every run is a run of `train.py`; the same command again goes on where a stopped one stands. Minutes on 2 cores. Replaces the
section "MAE on digits" of docs/results.md with the table it prints.
"""

import argparse
import io
import platform
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

from vitfw.data.index import open_samples
from vitfw.ladder import read_results, run_ladder
from vitfw.models.build import materialise
from vitfw.models.vit import ViT
from vitfw.report.recorder import read_metrics
from vitfw.run import source_commit
from vitfw.show import open_mae
from vitfw.train import main, train

TITLE = "## MAE on digits"
ENCODER = ["model.variant=mae_ti2", "model.width=96", "model.heads=3"]  # that of recipe mae_digits
TUNE = ["task.tune_per_class=10", "task.tune_lr=3e-3"]
FEW = ["data.per_class=10", "train.epochs=100", "train.global_batch=50"]
RESULTS = Path(__file__).parent.parent / "docs" / "results.md"


def study() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="runs/mae_digits_study")
    parser.add_argument("--words", nargs="*", default=["machine=cpu"], help="more words for every run")
    given = parser.parse_args()
    out, words = Path(given.out), given.words
    for seed in range(given.seeds):
        pretrained = out / f"pretrain-{seed}"
        check(main(["recipe=mae_digits", *TUNE, f"out={pretrained}", f"train.seed={seed}", *words]))
        ladder = ["recipe=ladder_digits", *ENCODER, f"train.seed={seed}", *words]
        for labels, own in (("all", []), ("few", FEW)):
            check(run_ladder([*ladder, *own, f"out={out}/random-{labels}-{seed}"], train))
            weights = f"weights={pretrained}/checkpoints/last.ckpt"
            check(run_ladder([*ladder, *own, weights, f"out={out}/mae-{labels}-{seed}"], train))
    text = report(out, given.seeds)
    print(text)
    replace_section(text)


def check(status: int) -> None:
    if status:
        sys.exit(f"a run ended with status {status}")


def report(out: Path, seeds: int) -> str:
    """The section of docs/results.md."""
    runs = [read_metrics(out / f"pretrain-{seed}", "val") for seed in range(seeds)]
    first, last = ({key: [run[at][key] for run in runs] for key in runs[0][at]} for at in (0, -1))
    epochs = [round(record["epoch"]) for record in runs[0]]
    signals = {"loss": "validation loss", "probe_acc1": "live probe", "knn_k20_t0.07_acc1": "20 neighbours"}
    signals |= {key: "short fine-tune on 10 of each class" for key in first if key.startswith("tune_")}
    lines = [
        TITLE,
        "",
        f"`python benchmarks/mae_digits.py --seeds {seeds}`: recipe `mae_digits`, then `ladder_digits` with",
        "this encoder, from its last weights and from the same encoder untrained; all 1,438 labelled images, or 10",
        "of each class; accuracy in percent on 359 images, mean and standard deviation over the seeds.",
        f"Commit {(source_commit() or 'unknown')[:12]}, torch {torch.__version__}, {platform.machine()}, CPU.",
        f"The short fine-tune is asked for with `{' '.join(TUNE)}`.",
        "",
        f"| while pretraining | after {epochs[0]} epochs | after {epochs[-1]} |",
        "|---|---|---|",
        *(
            f"| {title} (`{key}`) | {spread(first[key], digits)} | {spread(last[key], digits)} |"
            for key, title in signals.items()
            for digits in [3 if key == "loss" else 1]
        ),
        "",
        "| labels | rung | MAE | untrained encoder | margin |",
        "|---|---|---|---|---|",
    ]
    for labels in ("all", "few"):
        for rung in ("probe", "last_block", "full"):
            mae, random = (
                [accuracy(out / f"{start}-{labels}-{seed}", rung) for seed in range(seeds)]
                for start in ("mae", "random")
            )
            margin = statistics.mean(mae) - statistics.mean(random)
            lines.append(f"| {labels} | {rung} | {spread(mae)} | {spread(random)} | {margin:+.1f} |")
    tasks = [open_mae(str(out / f"pretrain-{seed}"))[0] for seed in range(seeds)]
    trained = [regression(task.encoder) for task in tasks]
    for seed, task in enumerate(tasks):
        torch.manual_seed(seed)
        materialise(task.encoder, "cpu")  # fresh weights
    fresh = [regression(task.encoder) for task in tasks]
    margin = statistics.mean(trained) - statistics.mean(fresh)
    lines += [
        f"| all | logistic regression | {spread(trained)} | {spread(fresh)} | {margin:+.1f} |",
        "",
        "The rung `probe` is the best head of a grid, chosen on held-out training images; the logistic regression (standardised",
        "mean patch token, scikit-learn) is a check from outside. The rates of `last_block` and `full` are those of the recipe,",
        "which were chosen with an eye on these test images (see above), for another encoder.",
    ]
    return "\n".join(lines) + "\n"


def regression(encoder: ViT) -> float:
    """Accuracy (percent) of a logistic regression on the standardised mean patch token: optimised to the end, it shows what
    the features hold, where the ladder's few updates show also how easily it is found."""
    (train_features, train_labels), (features, labels) = (read_features(encoder, split) for split in ("train", "val"))
    centre, deviation = train_features.mean(0), train_features.std(0) + 1e-6
    model = LogisticRegression(C=0.1, max_iter=1000).fit((train_features - centre) / deviation, train_labels)
    return 100.0 * float(model.score((features - centre) / deviation, labels))


@torch.no_grad()
def read_features(encoder: ViT, split: str) -> tuple[np.ndarray, np.ndarray]:
    samples = open_samples(f"data/digits/{split}-*.tar")
    pixels = np.stack([np.array(Image.open(io.BytesIO(samples.read(row)))) for row in range(len(samples))])
    images = torch.from_numpy(pixels)[:, None].float() / 127.5 - 1.0  # the recipe's mean and deviation are 0.5
    return encoder.eval()(images, output="tokens").mean(1).numpy(), samples.labels


def accuracy(folder: Path, rung: str) -> float:
    return next(result.scores["acc1"] for result in read_results(folder) if result.rung == rung)


def spread(values: list[float], digits: int = 1) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


def replace_section(text: str) -> None:
    """Puts the section in its place, or at the end."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Results\n"
    before, found, after = old.partition(TITLE + "\n")
    rest = after.partition("\n## ")
    tail = f"\n## {rest[2]}" if found and rest[1] else ""
    RESULTS.write_text(f"{before.rstrip()}\n\n{text}{tail}", encoding="utf-8")


if __name__ == "__main__":
    study()
