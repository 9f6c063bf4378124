"""The protocol over HTTP: an ASGI application."""
