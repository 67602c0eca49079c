"""The shipped suites, one YAML file each; installed as the package `quantkit.suites`."""
