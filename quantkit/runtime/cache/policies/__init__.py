"""Which tokens of a sequence over its budget go first: one file per policy, named as in `--kv-policy`."""

from quantkit.registry import Registry

REGISTRY = Registry(package=__name__, attribute="POLICY", noun="eviction policy")
