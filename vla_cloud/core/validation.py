"""Checks of a decoded observation that need neither torch nor an image library. Every refusal has a name to count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np


class RequestError(ValueError):
    """An observation that cannot be answered. ``cause`` is a stable short name for counters."""

    cause: ClassVar[str] = "request"


class WrongJointNames(RequestError):
    """Joint names or their order differ from the policy's."""

    cause = "wrong_joint_names"


class WrongJointPositions(RequestError):
    """Not one finite position a joint."""

    cause = "wrong_joint_positions"


class UnknownWord(RequestError):
    """The instruction holds a word that the policy never learned."""

    cause = "unknown_word"


class InstructionTooLong(RequestError):
    """The instruction does not fit the policy's fixed text length."""

    cause = "instruction_too_long"


class MissingImage(RequestError):
    """A camera that the policy looks through is not in the observation."""

    cause = "missing_image"


class ImageTooLarge(RequestError):
    """The encoded image has more bytes than allowed."""

    cause = "image_too_large"


class MalformedImage(RequestError):
    """Not a complete JPEG."""

    cause = "malformed_image"


class WrongImageSize(RequestError):
    """The image has other dimensions than the policy was trained on."""

    cause = "wrong_image_size"


def check_joints(joint_names: Sequence[str], joint_positions: Any, expected: Sequence[str]) -> None:
    """Refuses other names, another order (never re-ordered silently), a missing or a non-finite position."""
    if list(joint_names) != list(expected):
        raise WrongJointNames(f"joints {list(joint_names)}, the policy expects {list(expected)} in this order")
    positions = np.asarray(joint_positions, dtype=np.float64)
    if positions.shape != (len(expected),) or not np.isfinite(positions).all():
        raise WrongJointPositions(f"joint positions {positions.tolist()}; expected {len(expected)} finite values")


def image_of(images: Sequence[Any], camera: str) -> Any:
    """The CompressedImage whose ``header.frame_id`` is ``camera``."""
    for image in images:
        if image.header.frame_id == camera:
            return image
    found = ", ".join(repr(image.header.frame_id) for image in images) or "none"
    raise MissingImage(f"no image of camera {camera!r}; found: {found}")
