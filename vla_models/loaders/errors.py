"""Why a model cannot be loaded; without torch, for processes that only look for one."""

class CheckpointError(ValueError):
    """The folder cannot be loaded; the message says which file or tensor and what to do."""


class NotACheckpoint(CheckpointError):
    """A file that every checkpoint folder has is missing or unreadable."""


class UnsafeCheckpoint(CheckpointError):
    """The weights are pickled."""


class UnsupportedArchitecture(CheckpointError):
    """config.json describes a model that these modules do not implement."""


class UnsupportedConfig(CheckpointError):
    """A known architecture with an option that these modules do not implement."""


class MissingTensors(CheckpointError):
    """The model needs tensors that the checkpoint does not hold."""


class UnexpectedTensors(CheckpointError):
    """The checkpoint holds tensors that the model has no place for."""


class ShapeMismatch(CheckpointError):
    """A tensor has another shape than config.json implies."""


class UnsupportedDtype(CheckpointError):
    """A weight is not a floating-point tensor (a quantised checkpoint)."""
