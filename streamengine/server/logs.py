"""Log lines on stderr, as text or as one JSON object each. None holds a prompt, an answer, a key or a ticket."""

import logging
import sys
import time

import msgspec

from streamengine.config import ServerConfig


class JSONLines(logging.Formatter):
    """A record with its ``facts`` as fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextLines(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in getattr(record, "facts", {}).items())
        return super().format(record) + facts


def configure_logging(config: ServerConfig) -> None:
    """Of the whole process. uvicorn's own lines say nothing that ours do not, and may hold a query string."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if config.log_format == "json" else TextLines("%(levelname)s %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
