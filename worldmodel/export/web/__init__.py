"""A world as static files that play in a browser, without a server."""

from worldmodel.export.web.folder import export_web

__all__ = ["export_web"]
