"""The ladder's table, picture and recommendation, from made-up results."""

from pathlib import Path

import pytest
from PIL import Image

from vitfw.evaluate.ladder import RungResult, bytes_text, noise, order_of, recommend, table
from vitfw.evaluate.scores import binomial_error
from vitfw.report.ladder_plot import plot_ladder, spread

SIZES = {"probe": 7_690, "last_block": 7_097_098, "full": 85_806_346}


def results(images: int = 10_000, **accuracies: tuple[float, ...]) -> list[RungResult]:
    return [
        RungResult(
            rung=rung,
            seed=seed,
            scores={
                "acc1": accuracy,
                "mean_class_acc": accuracy - 1,
                "nll": 0.5,
                "ece": 0.02,
                "samples": float(images),
            },
            trainable=SIZES[rung],
            parameters=85_806_346,
            training_bytes=16 * SIZES[rung],
            images_per_second=100.0,
            seconds=600.0,
        )
        for rung, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]


def test_recommendation__stops_where_more_is_within_the_noise() -> None:
    found = recommend(results(probe=(80.0,), last_block=(90.0,), full=(90.5,)))
    assert found.rung == "last_block"
    assert "full is ahead by 0.50 points (90.50 against 90.00), within the noise of 0.84" in found.text
    assert "12.1 times the parameters" in found.text and "With one seed" in found.text


def test_recommendation__goes_on_where_the_gap_is_real() -> None:
    found = recommend(results(probe=(80.0, 80.2), last_block=(90.0, 90.1), full=(93.0, 93.2)))
    assert found.rung == "full" and "it beats last_block by 3.05 points" in found.text
    assert "2 seeds, 10,000 test images" in found.text and "With one seed" not in found.text


def test_recommendation__the_probe_may_be_the_best() -> None:
    found = recommend(results(probe=(91.0,), last_block=(90.0,), full=(85.0,)))
    assert found.rung == "probe" and "too few epochs, or a rate so high that it ruins pretrained weights" in found.text


def test_recommendation__a_small_test_set_cannot_tell() -> None:
    """The same gap of two points: noise with 100 images, a fact with 100,000."""
    accuracies = {"probe": (88.0,), "full": (90.0,)}
    assert recommend(results(images=100, **accuracies)).rung == "probe"
    assert recommend(results(images=100_000, **accuracies)).rung == "full"


def test_recommendation__spread_between_seeds_counts() -> None:
    steady = {"probe": (88.0, 88.0, 88.0), "full": (90.0, 90.0, 90.0)}
    assert recommend(results(images=100_000, **steady)).rung == "full"
    shaky = {"probe": (84.0, 88.0, 92.0), "full": (86.0, 90.0, 94.0)}
    assert recommend(results(images=100_000, **shaky)).rung == "probe"


def test_recommendation__needs_two_rungs() -> None:
    with pytest.raises(ValueError, match=r"ladder.rungs=\['probe'\]: a recommendation compares two rungs"):
        recommend(results(probe=(80.0,)))


def test_noise__is_that_of_the_test_set_and_of_the_seeds() -> None:
    one = results(probe=(80.0,))
    assert noise(one, "probe") == pytest.approx(binomial_error(80.0, 10_000)) == pytest.approx(0.4)
    four = results(probe=(78.0, 80.0, 80.0, 82.0))
    assert noise(four, "probe") == pytest.approx((0.4**2 + (8 / 3) / 4) ** 0.5)


def test_table__has_a_row_a_rung_in_the_order_of_size() -> None:
    found = results(full=(93.0, 94.0), probe=(80.0, 82.0), last_block=(90.0, 90.0))
    lines = table(found).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == order_of(found) == ["probe", "last_block", "full"]
    assert "top-1 %" in lines[0] and "top-5 %" not in lines[0]  # no run has it: fewer than six classes
    assert "81.00 +- 1.41" in lines[2] and "7,690" in lines[2] and "120 KiB" in lines[2]
    assert "| 8.27 " in lines[3] and "108 MiB" in lines[3] and "1.28 GiB" in lines[4]


def test_bytes__in_the_largest_unit() -> None:
    assert [bytes_text(n) for n in (12, 16 * 7_690, 16 * 7_097_098, 16 * 85_806_346)] == [
        "12 B",
        "120 KiB",
        "108 MiB",
        "1.28 GiB",
    ]


def test_plot__is_a_picture_with_the_recommended_rung_marked(tmp_path: Path) -> None:
    found = results(probe=(80.0, 81.0), last_block=(90.0, 90.4), full=(90.5, 90.2))
    path = plot_ladder(found, tmp_path / "ladder.png", title="a test", recommended="last_block")
    image = Image.open(path)
    assert image.size == (960, 630)
    colours = {colour for _, colour in image.getcolors(100_000) or []}
    assert (214, 94, 20) in colours and (31, 119, 180) in colours


def test_plot__equal_rungs_at_100_percent_can_be_drawn(tmp_path: Path) -> None:
    plot_ladder(results(probe=(100.0,), full=(100.0,)), tmp_path / "ladder.png", title="a test", recommended="probe")


def test_labels_of_rungs_of_like_size_do_not_touch() -> None:
    assert spread([100, 500, 900], [120, 120, 100], right=954) == [100, 500, 900]
    found = spread([100, 800, 850], [120, 120, 120], right=954)
    assert found[0] == 100 and found[2] - found[1] >= 136 and found[2] + 60 <= 954
