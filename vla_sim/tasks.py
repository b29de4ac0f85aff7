"""Task specifications, instruction phrasings and the word-level vocabulary.

text ──parse_instruction──▶ TaskSpec                (what the judge scores)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

COLOURS: tuple[str, ...] = ("red", "green", "blue", "yellow")
TASKS: tuple[str, ...] = ("touch", "pick")
TOUCH, PICK = 0, 1

PHRASES: dict[str, tuple[str, ...]] = {
    "touch": (
        "touch the {colour} {noun}",
        "tap the {colour} {noun}",
        "go to the {colour} {noun}",
        "reach the {colour} {noun}",
        "move to the {colour} {noun}",
        "please touch the {colour} {noun}",
        "please go to the {colour} {noun}",
    ),
    "pick": (
        "pick up the {colour} {noun}",
        "grab the {colour} {noun}",
        "lift the {colour} {noun}",
        "take the {colour} {noun}",
        "pick the {colour} {noun} up",
        "lift up the {colour} {noun}",
        "please pick up the {colour} {noun}",
        "please grab the {colour} {noun}",
    ),
}
NOUNS: tuple[str, ...] = ("block", "cube")

_SPECIALS = ("<pad>", "<unk>", "<bos>", "<sep>")


def _words() -> tuple[str, ...]:
    words = {word for phrases in PHRASES.values() for text in phrases for word in text.split()}
    words -= {"{colour}", "{noun}"}
    return tuple(sorted(words)) + COLOURS + NOUNS


VOCABULARY: tuple[str, ...] = _SPECIALS + _words()


@dataclass(frozen=True)
class TaskSpec:
    """What one episode asks for. `target` indexes COLOURS; `moving` cubes drift."""

    task: str
    target: int
    moving: bool = False
    cube_count: int | None = None  # None: drawn from 2..4 by the seed

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}, expected one of {TASKS}")
        if not 0 <= self.target < len(COLOURS):
            raise ValueError(f"target {self.target} is not an index into {COLOURS}")

    @property
    def task_id(self) -> int:
        """Index into TASKS."""
        return TASKS.index(self.task)

    @property
    def colour(self) -> str:
        """Name of the target's colour."""
        return COLOURS[self.target]


def random_task(rng: np.random.Generator, moving: bool | None = None) -> TaskSpec:
    """Uniform over task and colour; `moving` None draws it with probability one half."""
    task = TASKS[int(rng.integers(len(TASKS)))]
    target = int(rng.integers(len(COLOURS)))
    is_moving = bool(rng.random() < 0.5) if moving is None else moving
    return TaskSpec(task, target, is_moving)


def random_instruction(rng: np.random.Generator, task: str, target: int) -> str:
    """One phrasing of `task` about the cube COLOURS[target]."""
    phrases = PHRASES[task]
    text = phrases[int(rng.integers(len(phrases)))]
    return text.format(colour=COLOURS[target], noun=NOUNS[int(rng.integers(len(NOUNS)))])



def parse_instruction(text: str) -> TaskSpec:
    """The task a phrasing stands for; ValueError for a text that is none of PHRASES."""
    spec = _TEXT_TO_TASK.get(" ".join(text.lower().split()))
    if spec is None:
        raise ValueError(f"not a known instruction: {text!r}")
    return spec


_TEXT_TO_TASK = {
    phrase.format(colour=colour, noun=noun): TaskSpec(task, COLOURS.index(colour))
    for task, phrases in PHRASES.items()
    for phrase, colour, noun in product(phrases, COLOURS, NOUNS)
}
