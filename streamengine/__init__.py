"""streamengine: an async streaming engine for language models. Importing it imports no torch."""

from streamengine.compose import open_engine
from streamengine.config import EngineConfig, TransferConfig
from streamengine.engine import Engine, Generate, Result, Stream
from streamengine.errors import (
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QueueTimeout,
    RequestError,
    ShuttingDown,
    StartupError,
    StreamEngineError,
    Unavailable,
    UnsupportedFeature,
)
from streamengine.log import Outcome, TextDelta, Usage
from streamengine.sampling import SamplingParams
from streamengine.timing import Timing

__all__ = [
    "ContextLengthExceeded",
    "Engine",
    "EngineConfig",
    "EngineFailure",
    "Generate",
    "InvalidRequest",
    "ModelNotFound",
    "Outcome",
    "Overloaded",
    "QueueTimeout",
    "RequestError",
    "Result",
    "SamplingParams",
    "ShuttingDown",
    "StartupError",
    "Stream",
    "StreamEngineError",
    "TextDelta",
    "Timing",
    "TransferConfig",
    "Unavailable",
    "UnsupportedFeature",
    "Usage",
    "open_engine",
]
