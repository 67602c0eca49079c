"""The installed distribution: its name on package indexes, its version, and the commands that install its extras.

The distribution is not called `quantkit`, because on PyPI `quantkit` is a different project.
"""

from importlib import metadata

DISTRIBUTION = "quantkit-lm"  # the name in pyproject.toml


def own_version(absent: str) -> str:
    """Return the version of quantkit, or `absent` if quantkit runs from a folder without being installed."""
    return installed_version(DISTRIBUTION, absent)


def installed_version(name: str, absent: str) -> str:
    """Return the version of an installed package, or `absent` if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent


def install_command(extra: str) -> str:
    """Return the command that installs an extra of quantkit, such as `serve`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
