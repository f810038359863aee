"""`vitfw VERB`: thin verbs over the functions of the package. Status: 0 done, 1 found faults, 2 refused."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Verb = Callable[[list[str]], int]


def main(words: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status."""
    given = list(sys.argv[1:] if words is None else words)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if given else 2
    if given[0] not in VERBS:
        import difflib

        near = difflib.get_close_matches(given[0], VERBS, n=1) or list(VERBS)
        print(f"vitfw: {given[0]}: no such verb; did you mean {', '.join(near)}?", file=sys.stderr)
        return 2
    try:
        return VERBS[given[0]](given[1:])
    except (ValueError, OSError) as error:
        print(f"vitfw: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [f"  {name:<12}{(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    return "usage: vitfw VERB ...   (vitfw VERB --help says more)\n\n" + "\n".join(lines)


def train(words: list[str]) -> int:
    """recipe=NAME key=value ...: trains; the same as train.py"""
    from vitfw.startup import run

    def command() -> int:
        from vitfw.train import main as train_main  # takes seconds, in which a signal may come

        return train_main(words)

    return run(command)


def recipes(words: list[str]) -> int:
    """lists the recipes with their source and the result to expect"""
    from vitfw.config import find_file, names_of
    from vitfw.ladder import ladder_file, ladder_names

    _parser("recipes", recipes).parse_args(words)
    files = [(name, find_file("recipes", name)) for name in names_of("recipes")]
    files += [(name, ladder_file(name)) for name in ladder_names()]
    for name, file in files:
        header = _header(file)
        print(f"{name}\n" + "\n".join(f"    {line}" for line in header))
    return 0


def explain(words: list[str]) -> int:
    """KEY: type, default and meaning of a key, or of all keys of a section"""
    import difflib

    from vitfw.config import keys
    from vitfw.help import explain as text_of

    parser = _parser("explain", explain)
    parser.add_argument("key", help="such as optim.lr, or a section such as optim")
    key = parser.parse_args(words).key
    try:
        print(text_of(key))
    except KeyError:
        near = difflib.get_close_matches(key, [name for name, *_ in keys()], n=3) or ["optim.lr"]
        raise ValueError(f"{key}: no such key; did you mean {', '.join(near)}?") from None
    return 0


def count(words: list[str]) -> int:
    """recipe=NAME key=value ...: parameters, multiply-adds and memory of the model, as exact integers"""
    from vitfw.config import load
    from vitfw.models.build import count_model

    if words and words[0] in ("-h", "--help"):
        print(count.__doc__)
        return 0
    config = load(words)
    print(count_model(config.model, num_classes=getattr(config.task, "num_classes", 0)))
    return 0


def evaluate(words: list[str]) -> int:
    """PLACE data.val=... [key=value ...]: exact metrics, calibration, robustness, predictions (docs/evaluate.md)"""
    from vitfw.evaluate_command import evaluate_place

    evaluate_place(*_place(words, "eval", evaluate))
    return 0


def probe(words: list[str]) -> int:
    """PLACE data.train=... data.val=...: linear probes, nearest neighbours and regression on stored features"""
    from vitfw.probe_command import probe_place

    probe_place(*_place(words, "probe", probe))
    return 0


def predict(words: list[str]) -> int:
    """PLACE IMAGE ... [key=value ...]: the best classes of image files"""
    from vitfw.evaluate_command import predict_images

    place, rest = _place(words, "predict", predict)
    images = [word for word in rest if "=" not in word or Path(word).is_file()]
    answers = predict_images(place, images, [word for word in rest if word not in images])
    return 0 if all(answers) else 1


def _place(words: list[str], name: str, verb: Verb) -> tuple[str, list[str]]:
    """The network's place and the words after it."""
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: vitfw {name} {verb.__doc__}")
        sys.exit(0)
    if not words or ("=" in words[0] and not Path(words[0].removeprefix("local-dir:")).exists()):
        raise ValueError(f"vitfw {name} {(verb.__doc__ or '').splitlines()[0]}")
    return words[0], words[1:]


def shards(words: list[str]) -> int:
    """pack | verify | info: makes shards, checks them, says what is in them"""
    parser = _parser("shards", shards)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="images to shards: shuffled over classes, atomic, restartable")
    packing.add_argument(
        "source",
        help="folder of class folders, FILE.csv, FILE.jsonl, FILE.parquet, torchvision:NAME:SPLIT:ROOT, shards",
    )
    packing.add_argument("out", help="folder for OUT/PREFIX-00000.tar, ...")
    packing.add_argument("--prefix", default="train")
    packing.add_argument("--shard-size", type=int, default=1000, help="samples of a shard")
    packing.add_argument("--seed", type=int, default=0, help="of the shuffle")
    packing.add_argument("--short-side", type=int, help="shrink to this short side in pixels; needs --encode")
    packing.add_argument("--encode", choices=("keep", "jpeg", "png", "webp"), default="keep")
    packing.add_argument("--quality", type=int, default=95, help="of jpeg and webp, 1..100")
    packing.add_argument("--classes", help="file of class names, one a line")
    packing.add_argument(
        "--on-bad-image", choices=("raise", "skip"), default="raise", help="skip: leave it out and say so"
    )
    packing.add_argument("--threads", type=int, default=4)
    for name, text in (
        ("verify", "decodes everything; status 1 where something is wrong"),
        ("info", "what is in the shards"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("pattern", help="such as 'data/train-{000..099}.tar'")
        verb.add_argument("--classes", help="file of class names, one a line")
    given = parser.parse_args(words)
    if given.verb == "pack":
        from vitfw.data.pack import PackOptions, pack

        options = PackOptions(
            shard_size=given.shard_size, seed=given.seed, short_side=given.short_side, encode=given.encode, quality=given.quality,
            on_bad_image=given.on_bad_image,
        )  # fmt: skip
        bar = sys.stderr.isatty()
        pack(
            given.source,
            given.out,
            prefix=given.prefix,
            options=options,
            classes=given.classes,
            threads=given.threads,
            progress=bar,
        )
        return 0
    from vitfw.data.verify import info, verify

    if given.verb == "info":
        print(info(given.pattern, classes=given.classes))
        return 0
    found = verify(given.pattern, classes=given.classes, progress=sys.stderr.isatty())
    print(found.describe())
    return 0 if found.sound else 1


def checkpoint(words: list[str]) -> int:
    """info | diff | average | consolidate: what is in checkpoints, what they differ in, new files from them"""
    from vitfw.checkpoint_command import main as checkpoint_main

    return checkpoint_main(words)


def upload(words: list[str]) -> int:
    """RUN_FOLDER [--project P]: one whole W&B run out of a run's own records, of all its attempts"""
    from vitfw.upload_command import main as upload_main

    return upload_main(words)


def export(words: list[str]) -> int:
    """CHECKPOINT FOLDER [--onnx]: weights as a folder that timm and Hugging Face load, and as ONNX"""
    from vitfw.models.export import export_checkpoint

    parser = _parser("export", export)
    parser.add_argument("checkpoint", help="a checkpoint, run folder, weight file or timm:NAME")
    parser.add_argument("folder", help="where model.safetensors and config.json go")
    parser.add_argument("--which", choices=("auto", "raw", "ema"), default="auto", help="raw or averaged weights")
    parser.add_argument("--format", choices=("timm", "vitfw"), default="timm", help="vitfw: for networks timm has not")
    parser.add_argument("--onnx", action="store_true", help="model.onnx too, checked against the model")
    given = parser.parse_args(words)
    done = export_checkpoint(given.checkpoint, given.folder, which=given.which, format=given.format, onnx=given.onnx)
    print(f"{done.folder}: weights from entry {done.entry}")
    if done.onnx_difference is not None:
        print(f"model.onnx: largest difference to the model {done.onnx_difference:.1e}")
    return 0


def show(words: list[str]) -> int:
    """augment recipe=NAME ... | reconstruct PLACE IMAGES ...: pictures of what a run sees and makes"""
    if words[:1] == ["reconstruct"]:
        from vitfw.show import show_reconstruct

        return show_reconstruct(words[1:])
    if words[:1] == ["augment"]:
        return show_augment(words[1:])
    if words[:1] in (["-h"], ["--help"]):
        print(
            f"usage: vitfw show {show.__doc__}\n(vitfw show augment --help and vitfw show reconstruct --help say more)"
        )
        return 0
    raise ValueError(f"vitfw show {(show.__doc__ or '').splitlines()[0]}")


def show_augment(words: list[str]) -> int:
    """recipe=NAME key=value ... [-o FILE.png]: real samples before and after augmentation"""
    from vitfw.config import load
    from vitfw.data.decode import decode
    from vitfw.data.section import open_split
    from vitfw.data.sheet import contact_sheet
    from vitfw.models.variants import input_size

    parser = _parser("show augment", show_augment)
    parser.add_argument("-o", "--out", default="augment.png")
    parser.add_argument("--samples", type=int, default=6, help="rows of the sheet")
    given, rest = parser.parse_known_args(words)
    config = load(rest)
    samples = open_split(config.data, "train")
    channels = config.model.in_channels
    step = max(1, len(samples) // given.samples)
    images = [decode(samples.read(row), channels=channels) for row in range(0, len(samples), step)][: given.samples]
    path = contact_sheet(
        images,
        config.augment,
        Path(given.out),
        size=input_size(config.model),
        channels=channels,
        seed=config.train.seed or 0,
    )
    print(f"wrote {path}")
    return 0


def _parser(name: str, verb: Verb) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"vitfw {name}", description=verb.__doc__)


def _header(path: Path) -> list[str]:
    """The comment at the top of a recipe: source, command, expected result."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    return [line.removeprefix("#").strip() for line in head]


VERBS: dict[str, Verb] = {
    "train": train,
    "recipes": recipes,
    "explain": explain,
    "count": count,
    "shards": shards,
    "eval": evaluate,
    "probe": probe,
    "predict": predict,
    "checkpoint": checkpoint,
    "export": export,
    "show": show,
    "upload": upload,
}

if __name__ == "__main__":
    sys.exit(main())
