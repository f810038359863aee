"""The command: `torchrun train.py recipe=deit_b machine=gpu8 optim.lr=1e-3`; the path it takes is vitfw/train.py."""

import sys

from vitfw.startup import run


def command() -> int:
    from vitfw.train import main  # takes seconds, in which a signal may come

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run(command, to_the_end=True))
