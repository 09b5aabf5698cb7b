"""OpenAI's HTTP interface over the engine: requests and answers are translated by pure code, routes move bytes."""

from streamengine.server.openai.routes import openai_routes

__all__ = ["openai_routes"]
