"""Experiments: what has not been shown to help, outside of the stable surface.

Nothing else imports this package; a config names what it uses as `worldmodel.experiments.MODULE:NAME`. It may
change or go in any release.
"""
