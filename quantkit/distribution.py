"""The installed distribution: its name on package indexes, its version, and the commands that install its extras.

The name differs from the package's: on PyPI, `quantkit` is a different project.
"""

from importlib import metadata

DISTRIBUTION = "quantkit-lm"  # the name in pyproject.toml


def own_version(absent: str) -> str:
    """Return the version of quantkit; `absent` if it runs from a folder and is not installed."""
    return installed_version(DISTRIBUTION, absent)


def installed_version(name: str, absent: str) -> str:
    """Return the version of an installed package; `absent` if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent


def install_command(extra: str) -> str:
    """Return the command that installs an extra of quantkit, such as `serve`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
