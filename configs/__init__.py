"""The shipped configurations: YAML files that `worldmodel.config.load` finds by name."""
