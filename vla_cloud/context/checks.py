"""What the gateway checks of an observation before it costs anything: no torch, no image library.

The image is *not* decoded here. A lane does that: decoders are the part that untrusted bytes could crash, and a lane is
started again while the gateway would take all robots with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vla_cloud.core.validation import ImageTooLarge, InstructionTooLong, UnknownWord, check_joints, image_of
from vla_common.manifest import Camera, Manifest
from vla_models import text


@dataclass(frozen=True)
class CheckedObservation:
    """Text ids (the policy's fixed length) and the image as it came, of bounded size."""

    ids: tuple[int, ...]
    jpeg: bytes


class ObservationChecks:
    """The checks for one model."""

    def __init__(self, manifest: Manifest, max_image_bytes: int) -> None:
        """Raises ValueError for a model with several cameras."""
        if len(manifest.cameras) != 1:
            names = [camera.name for camera in manifest.cameras]
            raise ValueError(f"the backbone takes the image of one camera; model {manifest.name!r} lists {names}")
        self.camera: Camera = manifest.cameras[0]
        self._manifest, self._max_image_bytes = manifest, max_image_bytes

    def check(self, observation: Any) -> CheckedObservation:
        """Checks an Observation message.

        Raises a subclass of RequestError.
        """
        check_joints(observation.joint_names, observation.joint_positions, self._manifest.joint_names)
        ids = self.tokenize(observation.instruction)
        jpeg = image_of(observation.images, self.camera.name).data.tobytes()
        if len(jpeg) > self._max_image_bytes:
            told = f"{len(jpeg)} bytes, limit {self._max_image_bytes}"
            raise ImageTooLarge(f"image of camera {self.camera.name!r}: {told}")
        return CheckedObservation(ids, jpeg)

    def tokenize(self, instruction: str) -> tuple[int, ...]:
        """Ids of an instruction.

        Raises UnknownWord or InstructionTooLong.
        """
        expected = self._manifest.instruction
        try:
            return tuple(text.tokenize(instruction, expected.vocabulary, expected.num_tokens))
        except text.UnknownWord as error:
            raise UnknownWord(str(error)) from error
        except text.InstructionTooLong as error:
            raise InstructionTooLong(str(error)) from error
