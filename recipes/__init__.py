"""The shipped recipes, one YAML file each; installed as the package `quantkit.recipes`."""
