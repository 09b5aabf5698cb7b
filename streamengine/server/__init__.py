"""The server process: one port for WebSocket, HTTP and the page. asyncio, because uvicorn is."""

from streamengine.server.run import Server, serve

__all__ = ["Server", "serve"]
