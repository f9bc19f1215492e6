"""When a checkpoint counts as good, and the file that says so."""

import json

import pytest
from etils import epath

from MaxText.checkpointing.good_steps import GoodSteps
from MaxText.errors import UserError


def good_steps(folder, healthy_steps=3, lines=None):
    return GoodSteps(
        epath.Path(folder), healthy_steps, [].append if lines is None else lines.append
    )


def test_healthy_updates_in_a_row_make_a_checkpoint_good(tmp_path):
    good = good_steps(tmp_path)
    good.watch(10)
    for step in range(8, 13):  # reports lag behind: those up to 10 say nothing about it
        good.observe(step, healthy=True)
    assert good.steps == set()
    good.observe(13, healthy=True)
    assert good.steps == {10}


def test_an_unhealthy_update_starts_the_count_again(tmp_path):
    good = good_steps(tmp_path)
    good.watch(10)
    good.observe(11, healthy=True)
    good.observe(12, healthy=True)
    good.watch(12)
    good.observe(13, healthy=False)
    for step in (14, 15):
        good.observe(step, healthy=True)
        assert good.steps == set()
    good.observe(16, healthy=True)
    assert good.steps == {10, 12}


def test_without_healthy_steps_each_is_good_at_once(tmp_path):
    good = good_steps(tmp_path, healthy_steps=0)
    good.watch(4)
    good.observe(5, healthy=False)
    assert good.steps == {4}


def test_the_newest_good_one_and_the_next_to_be_are_kept(tmp_path):
    good = good_steps(tmp_path)
    assert good.to_keep() == set()
    for step in (0, 5, 6, 7):
        good.watch(step)
    assert good.to_keep() == {0}
    good.promote(0)
    good.promote(6)
    assert good.to_keep() == {6, 7}
    good.forget(lambda step: step > 4)
    assert good.to_keep() == {0}


def test_the_file_comes_back_without_what_is_not_on_disk(tmp_path):
    good = good_steps(tmp_path)
    assert not good.changed
    for step in (2, 9, 5):
        good.promote(step)
    assert good.changed
    good.write(lambda step: step != 9)
    assert good.changed  # 9 is on its way
    assert [path.name for path in tmp_path.iterdir()] == ["good.json"]
    assert json.loads((tmp_path / "good.json").read_text())["good"] == [2, 5]
    again = good_steps(tmp_path)
    assert again.steps == {2, 5}
    assert not again.changed


def test_any_damage_of_the_file_is_told_and_nothing_is_good(tmp_path):
    good = good_steps(tmp_path)
    good.promote(100)
    good.write(lambda step: True)
    file = tmp_path / "good.json"
    content = file.read_bytes()
    damaged = [content[:place] for place in range(0, len(content), 7)]
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        damaged.append(bytes(flipped))
    for data in damaged:
        file.write_bytes(data)
        lines = []
        assert good_steps(tmp_path, lines=lines).steps in (set(), {100})
        assert lines or json.loads(data)["good"] == [100]


def test_a_file_that_cannot_be_read_stops_the_run(tmp_path):
    (tmp_path / "good.json").mkdir()
    with pytest.raises(UserError, match=r"good\.json.*cannot be read"):
        good_steps(tmp_path).steps  # noqa: B018


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    good = good_steps(tmp_path)
    good.promote(1)
    good.write(lambda step: True)
    before = (tmp_path / "good.json").read_bytes()
    (tmp_path / "good.json.partial").mkdir()
    good.promote(2)
    with pytest.raises(OSError, match="partial"):
        good.write(lambda step: True)
    assert (tmp_path / "good.json").read_bytes() == before
    assert good.changed
