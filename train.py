"""The command: `torchrun train.py recipe=deit_b machine=gpu8 optim.lr=1e-3`; the path it takes is vitfw/train.py."""

import sys

from vitfw.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
