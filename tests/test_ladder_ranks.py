"""The ladder under two processes, whole and sharded: a stop in every rung, the table of the uncut one, the probe of one
process bit for bit."""

from pathlib import Path

import pytest
from conftest import torchrun
from ladder_words import SMALL, run, weights

from vitfw.ladder import read_results

# the upper rung starts from the probe's head; the same micro-batches for any number of processes
WORDS = [
    *(word for word in SMALL if not word.startswith("full.")),
    *("ladder.rungs=[probe,last_block]", "ladder.carry_head=true"),
    *("machine.images_per_device=10", "machine.eval_images_per_device=8"),
]


STOPS = {"probe": "probe.machine.wall_minutes=1e-6", "last_block": "last_block.stop_after=2"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes__stopped_in_every_rung_give_the_table_of_one_that_was_not(tmp_path: Path) -> None:
    words = [*WORDS, f"weights={weights(tmp_path / 'weights')}"]
    assert run([*words, f"out={tmp_path / 'one'}"]) == 0
    one = read_results(tmp_path / "one")
    for strategy, stops in (("ddp", ["probe", "last_block"]), ("fsdp2", ["last_block"])):
        out = tmp_path / strategy
        two = [*words, f"machine.strategy={strategy}", f"out={out}"]
        for rung in stops:
            stopped = torchrun(2, [*two, STOPS[rung]])
            assert stopped.returncode != 0 and "start the same command again" in stopped.stdout, stopped.stderr
            assert (out / f"{rung}-seed0").exists() and not (out / "ladder.json").exists()
        done = torchrun(2, two)
        assert done.returncode == 0 and done.stdout.count("top-1 %") == 1, done.stderr  # one table, from one process
        found = read_results(out)
        assert found[0].same_outcome(one[0])  # features, choice, head and scores: the same bits
        assert (found[1].trainable, found[1].training_bytes) == (one[1].trainable, one[1].training_bytes)
        assert found[1].scores["nll"] == pytest.approx(one[1].scores["nll"], rel=1e-4)
        assert found[1].scores["acc1"] == pytest.approx(one[1].scores["acc1"], abs=100 / 359 + 1e-9)
