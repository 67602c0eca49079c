"""Policies that choose which tokens of a sequence leave a full KV cache: one file each, named as in `--kv-policy`."""

from quantkit.registry import Registry

REGISTRY = Registry(package=__name__, attribute="POLICY", noun="eviction policy")
