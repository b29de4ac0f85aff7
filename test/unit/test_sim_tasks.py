import numpy as np
import pytest

from vla_models.text import UnknownWord, tokenize
from vla_sim.config import SimConfig
from vla_sim.judge import RUNNING, SUCCESS, TIMEOUT, WRONG_OBJECT, Judge
from vla_sim.tasks import (
    COLOURS,
    PHRASES,
    TASKS,
    VOCABULARY,
    TaskSpec,
    parse_instruction,
    random_instruction,
)


def test_special_words_have_their_agreed_ids():
    assert VOCABULARY[:4] == ("<pad>", "<unk>", "<bos>", "<sep>")
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert sum(len(phrases) for phrases in PHRASES.values()) >= 10


def test_every_phrasing_is_in_the_policys_language_and_parsed_back():
    rng = np.random.default_rng(0)
    for _ in range(300):
        task, target = TASKS[rng.integers(2)], int(rng.integers(4))
        text = random_instruction(rng, task, target)
        assert len(tokenize(text, VOCABULARY, 9)) == 9
        assert parse_instruction(text) == TaskSpec(task, target)


def test_unknown_words_and_texts():
    with pytest.raises(UnknownWord, match="purple"):
        tokenize("touch the purple cube", VOCABULARY, 9)
    with pytest.raises(ValueError, match="purple"):
        parse_instruction("touch the purple cube")
    with pytest.raises(ValueError, match="dance"):
        TaskSpec("dance", 0)
    with pytest.raises(ValueError, match="9"):
        TaskSpec("pick", 9)


PRESENT = np.array([True, True, False, True])
NOTHING = np.zeros(4, dtype=bool)
ON_TABLE = np.zeros(4)


def judge_of(task):
    return Judge(SimConfig(), TaskSpec(task, COLOURS.index("green")), PRESENT)


def touching(cube):
    return np.arange(4) == cube


def raised(cube, height_m):
    return np.where(np.arange(4) == cube, height_m, 0.0)


def run(judge, seconds, touched=NOTHING, lift_m=ON_TABLE):
    for _ in range(round(seconds * 100)):
        judge.update(0.01, touched, lift_m)
    return judge.outcome


def test_touch_adds_up_to_a_tenth_of_a_second():
    judge = judge_of("touch")
    assert run(judge, 0.05, touching(1)) == RUNNING
    assert run(judge, 1.0) == RUNNING
    assert run(judge, 0.04, touching(1)) == RUNNING
    assert run(judge, 0.01, touching(1)) == SUCCESS


def test_touching_another_cube_is_wrong_after_more_than_a_tenth_of_a_second():
    judge = judge_of("touch")
    assert run(judge, 0.1, touching(3)) == RUNNING
    assert run(judge, 0.01, touching(3)) == WRONG_OBJECT
    assert run(judge, 0.5, touching(1)) == WRONG_OBJECT, "the first verdict is final"


def test_pick_must_be_held_without_a_break():
    judge = judge_of("pick")
    assert run(judge, 0.29, lift_m=raised(1, 0.09)) == RUNNING
    assert run(judge, 0.01, lift_m=raised(1, 0.07)) == RUNNING
    assert run(judge, 0.29, lift_m=raised(1, 0.09)) == RUNNING
    assert run(judge, 0.01, lift_m=raised(1, 0.09)) == SUCCESS


def test_pick_of_another_cube_is_wrong_but_brushing_it_is_not():
    judge = judge_of("pick")
    assert run(judge, 1.0, touched=touching(0), lift_m=raised(0, 0.02)) == RUNNING
    assert run(judge, 0.01, lift_m=raised(0, 0.031)) == WRONG_OBJECT


def test_absent_cubes_do_not_count_and_time_runs_out():
    judge = judge_of("pick")
    assert run(judge, 7.99, lift_m=raised(2, 1.0)) == RUNNING
    assert run(judge, 0.01) == TIMEOUT
